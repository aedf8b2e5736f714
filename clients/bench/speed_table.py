"""Measures the README's table of speed: every dtype, off against each drafter, alone and in a batch.

Starts `draftline-server` for one dtype after the other on a free port and drives it with draftline.bench,
whose speculation settings take turns so that each speedup compares runs of the same minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from draftline.bench.report import report_object, summaries
from draftline.bench.runner import BenchResult, Observer, run_bench
from draftline.bench.settings import BenchSettings
from draftline.bench.workload import WorkloadError
from draftline.errors import DraftlineError

COLUMNS = (
    "dtype",
    "batch",
    "speculation",
    "tokens/s",
    "speedup",
    "acceptance length",
    "tokens/step",
    "TTFT p50 ms",
    "token p50 ms",
    "token p99 ms",
)


class ServerFailedError(Exception):
    """The service did not start; its own words are on stderr."""


@contextlib.contextmanager
def local_server(*arguments: str) -> Iterator[str]:
    """Runs `draftline-server` on a free port until the block ends; gives its address once it serves."""
    command = [str(Path(sys.executable).with_name("draftline-server")), "--listen", "127.0.0.1:0"]
    server = subprocess.Popen(
        [*command, "--log-level", "warning", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        ready = server.stdout.readline().split()
        if not ready or ready[0] != "READY":
            raise ServerFailedError(f"draftline-server ended with code {server.wait()}")
        yield dict(field.split("=", 1) for field in ready[1:])["listen"]
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=120)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


class Lines(Observer):
    """One line on stderr per run."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def run(self, description: str) -> None:
        print(f"{self._dtype}: {description}", file=sys.stderr, flush=True)


def measure(
    prompts: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help="Rows {id, category, turns} or {prompt}.")
    ],
    model: Annotated[str, typer.Option(help="As for draftline-server; empty is the embedded one.")] = "",
    dtypes: Annotated[str, typer.Option(metavar="DTYPE,...")] = "float32,bfloat16,int8",
    draft_model: Annotated[str, typer.Option(help="As for draftline-server.")] = "layers:6",
    concurrency: Annotated[str, typer.Option(metavar="N,...")] = "1,16",
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many prompts.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Figures are medians over rounds.")] = 3,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write every dtype's report here.")
    ] = None,
) -> None:
    """Prints one Markdown table of greedy decoding speed."""
    print(table_head(), flush=True)
    reports: dict[str, Any] = {}
    for dtype in dtypes.split(","):
        arguments = ["--dtype", dtype, "--speculation", "ngram,draft-model", "--draft-model", draft_model]
        with local_server(*arguments, *(["--model", model] if model else [])) as address:
            settings = BenchSettings(
                server=address,
                prompts=prompts,
                speculation=("off", "ngram", "draft-model"),
                concurrency=tuple(int(level) for level in concurrency.split(",")),
                max_tokens=max_tokens,
                limit=limit,
                temperature=0.0,
                rounds=rounds,
            )
            result = asyncio.run(run_bench(settings, Lines(dtype)))
        print("\n".join(table_lines(dtype, result)), flush=True)
        reports[dtype] = report_object(result)
    if json_out is not None:
        json_out.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")


def table_head() -> str:
    """Head and rule of the Markdown table."""
    rule = ["---" if position < 3 else "---:" for position in range(len(COLUMNS))]
    return f"| {' | '.join(COLUMNS)} |\n| {' | '.join(rule)} |"


def table_lines(dtype: str, result: BenchResult) -> list[str]:
    """One Markdown row per load and speculation setting."""
    lines = []
    for entry in summaries(result):
        cells = [
            dtype,
            f"{entry['load']['value']:g}",
            entry["speculation"],
            _cell(entry["tokens_per_second"], 1),
            _cell(entry["speedup"], 2),
            _cell(entry["acceptance_length"], 2),
            _cell(entry["tokens_per_step"], 2),
            _cell(entry["time_to_first_token_p50"], 0, 1000),
            _cell(entry["inter_token_p50"], 1, 1000),
            _cell(entry["inter_token_p99"], 1, 1000),
        ]
        failed = f" {entry['num_errors']} failed" if entry["num_errors"] else ""
        lines.append(f"| {' | '.join(cells)} |{failed}")
    return lines


def _cell(value: float | None, digits: int, factor: float = 1) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


if __name__ == "__main__":
    try:
        typer.run(measure)
    except (DraftlineError, ServerFailedError, WorkloadError) as error:
        sys.exit(f"error: {error}")
