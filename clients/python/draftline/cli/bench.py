"""`draftline bench`: measures a running service; the work is done in draftline.bench."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from draftline.bench.measure import RequestRecord
from draftline.bench.report import COLUMNS, report_object, table_rows
from draftline.bench.runner import BenchResult, Observer, run_bench
from draftline.bench.settings import BenchSettings
from draftline.bench.workload import WorkloadError
from draftline.cli import common
from draftline.cli import sampling_flags as flags
from draftline.labels import METHODS


def bench(
    prompts: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help="Rows {id, category, turns} or {prompt}.")
    ],
    server: common.Server = common.DEFAULT_SERVER,
    concurrency: Annotated[
        str | None, typer.Option(metavar="N,...", help="Closed loop: requests in flight. [default: 1]")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="R", help="Open loop: Poisson arrivals per second.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Replays TIMESTAMP,ContextTokens,GeneratedTokens."),
    ] = None,
    trace_speed: Annotated[float, typer.Option(help="The trace's arrivals come this much faster.")] = 1.0,
    speculation: Annotated[
        str, typer.Option(metavar="METHOD,...", help=f"Of default, {', '.join(METHODS)}.")
    ] = "default",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most generated tokens per request.")] = 128,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use at most this many prompts or trace rows.")
    ] = None,
    temperature: flags.Temperature = None,
    seed: Annotated[int, typer.Option(min=0, help="Of requests, arrivals and the trace's prompts.")] = 0,
    ignore_eos: flags.IgnoreEos = False,
    warmup: Annotated[int, typer.Option(min=0, help="Unmeasured requests per speculation setting.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Repeat all settings in turn; figures are medians.")] = 1,
    num_draft_tokens: common.NumDraftTokens = None,
    acceptance_rule: common.AcceptanceRule = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Deadline of each request.")
    ] = None,
    share_prefix_cache: Annotated[
        bool, typer.Option("--share-prefix-cache", help="Let runs hit each other's cached prompts.")
    ] = False,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write every figure and request here.")
    ] = None,
) -> None:
    """Measures tokens/s, latencies and acceptance; prints a table at the end.

    Exit code 1 if the service cannot be reached or a run had no success.
    """
    _check_load_flags(concurrency, rate, trace, trace_speed)
    settings = BenchSettings(
        server=server,
        prompts=prompts,
        speculation=_methods(speculation),
        concurrency=_levels(concurrency) if rate is None and trace is None else (),
        rate=rate,
        trace=trace,
        trace_speed=trace_speed,
        max_tokens=max_tokens,
        limit=limit,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        warmup=warmup,
        rounds=rounds,
        num_draft_tokens=num_draft_tokens,
        acceptance_rule=acceptance_rule,
        timeout=timeout,
        share_prefix_cache=share_prefix_cache,
    )
    if json_out is not None:
        _check_writable(json_out)
    with common.one_line_failure():
        result = _run(settings)
    if json_out is not None:
        json_out.write_text(json.dumps(report_object(result), indent=1) + "\n", encoding="utf-8")
    print_table(result)
    if any(run.figures["num_errors"] == run.figures["num_requests"] for run in result.runs):
        raise typer.Exit(1)


def print_table(result: BenchResult) -> None:
    """The end table on stdout, with a line below it for errors and clipped lengths."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if position < 2 else "right", no_wrap=position < 2)
    for row in table_rows(result):
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 160  # a pipe has no width: keep each row on one line
    console.print(table)
    if result.num_clipped:
        typer.echo(f"{result.num_clipped} trace rows were clipped to the context limit")
    messages = {r.error: r.error_message for run in result.runs for r in run.records if r.error}
    for error, message in sorted(messages.items()):
        typer.echo(f"{error}: {message}")


class _ProgressBar(Observer):
    """Shows the run in hand and the share of all requests done."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("connecting", total=None)

    def begin(self, total_requests: int) -> None:
        self._progress.update(self._task, total=total_requests)

    def run(self, description: str) -> None:
        self._progress.update(self._task, description=description)

    def request(self, record: RequestRecord) -> None:
        self._progress.advance(self._task)


def _run(settings: BenchSettings) -> BenchResult:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            return asyncio.run(run_bench(settings, _ProgressBar(progress)))
    except WorkloadError as error:
        raise typer.BadParameter(str(error)) from error


def _check_load_flags(
    concurrency: str | None, rate: float | None, trace: Path | None, trace_speed: float
) -> None:
    if sum(value is not None for value in (concurrency, rate, trace)) > 1:
        raise typer.BadParameter("give one of --concurrency, --rate and --trace")
    if rate is not None and not 0 < rate < float("inf"):
        raise typer.BadParameter(f"{rate} is not a positive rate", param_hint="--rate")
    if not 0 < trace_speed < float("inf"):
        raise typer.BadParameter(f"{trace_speed} is not a positive speed", param_hint="--trace-speed")


def _levels(text: str | None) -> tuple[int, ...]:
    try:
        levels = tuple(int(part) for part in (text or "1").split(","))
    except ValueError:
        levels = ()
    if not levels or min(levels) < 1 or len(set(levels)) < len(levels):
        raise typer.BadParameter(
            f"{text!r} is not a list of different positive numbers", param_hint="--concurrency"
        )
    return levels


def _methods(text: str) -> tuple[str, ...]:
    methods = tuple(part.strip() for part in text.split(","))
    for method in methods:
        if method != "default" and method not in METHODS:
            choices = ", ".join(("default", *METHODS))
            raise typer.BadParameter(f"{method!r} is not one of {choices}", param_hint="--speculation")
    if len(set(methods)) < len(methods):
        raise typer.BadParameter(f"a method is named twice in {text!r}", param_hint="--speculation")
    return methods


def _check_writable(path: Path) -> None:
    """A report that cannot be written must be known before the measurement, not after it."""
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="--json") from error
