"""Drives a benchmark: rounds of interleaved runs, so that a ratio compares runs of the same minutes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftline.aio import AsyncClient
from draftline.bench.load import at_arrivals, closed_loop
from draftline.bench.measure import RequestRecord, run_figures
from draftline.bench.settings import BenchSettings, Load
from draftline.bench.trace import read_trace, trace_items
from draftline.bench.workload import WorkItem, poisson_arrivals, read_prompts
from draftline.errors import FailedPreconditionError
from draftline.info import ModelInfo, ServerInfo
from draftline.options import GenerateOptions
from draftline.retry import NO_RETRY


@dataclass(frozen=True)
class Run:
    """One measured run and its place in the plan."""

    round: int
    load: Load
    speculation: str
    figures: dict[str, Any]
    records: list[RequestRecord]


@dataclass(frozen=True)
class BenchResult:
    """All runs of a benchmark and what they ran against."""

    settings: BenchSettings
    model: ModelInfo
    server: ServerInfo
    num_clipped: int
    runs: list[Run]


class Observer:
    """Told what happens; the default does nothing. The command shows a progress bar."""

    def begin(self, total_requests: int) -> None:
        """The measured requests of all runs."""

    def run(self, description: str) -> None:
        """A run (or the warm-up) begins."""

    def request(self, record: RequestRecord) -> None:
        """A measured request ended."""


def run_order(settings: BenchSettings) -> list[tuple[int, Load, str]]:
    """(round, load, speculation) of every run: the settings take turns, each round begins with the next."""
    order = []
    for number in range(settings.rounds):
        first = number % len(settings.speculation)
        turn = settings.speculation[first:] + settings.speculation[:first]
        order += [(number, load, method) for load in settings.loads() for method in turn]
    return order


async def run_bench(settings: BenchSettings, observer: Observer | None = None) -> BenchResult:
    """Runs the whole benchmark.

    Raises WorkloadError for unusable files and DraftlineError if the service cannot be reached, lacks a
    method or fails a warm-up request; failures of measured requests are counted instead.
    """
    observer = observer or Observer()
    read_prompts(settings.prompts, 1)  # an unusable file is told before the service is asked
    async with AsyncClient(settings.server, retry=NO_RETRY) as client:
        model = await client.model_info()
        _check_methods(settings.speculation, model)
        items, num_clipped = await _items(client, settings, model)
        for method in settings.speculation:
            observer.run(f"warm-up, {method}")
            await _warm_up(client, settings, items, method)
        order = run_order(settings)
        observer.begin(len(order) * len(items))
        runs = []
        for number, load, method in order:
            observer.run(f"round {number + 1}/{settings.rounds}, {load}, {method}")
            runs.append(await _run(client, settings, items, (number, load, method), observer.request))
        return BenchResult(settings, model, await client.server_info(), num_clipped, runs)


def _check_methods(methods: Sequence[str], model: ModelInfo) -> None:
    loaded = {"off", "default", *(drafter.method for drafter in model.drafters)}
    for method in methods:
        if method not in loaded:
            raise FailedPreconditionError(
                f"speculation {method} is not loaded; loaded: {', '.join(sorted(loaded - {'default'}))}"
            )


async def _items(
    client: AsyncClient, settings: BenchSettings, model: ModelInfo
) -> tuple[list[WorkItem], int]:
    if settings.trace is not None:
        requests = read_trace(settings.trace, settings.limit)
        pool = [token for row in read_prompts(settings.prompts) for token in await client.tokenize(row.text)]
        return trace_items(
            requests,
            pool,
            speed=settings.trace_speed,
            max_prompt_tokens=model.max_prompt_tokens,
            max_context_tokens=model.max_context_tokens,
            seed=settings.seed,
        )
    rows = read_prompts(settings.prompts, settings.limit)
    items = [
        WorkItem(row.id, row.category, row.prompt, settings.max_tokens, settings.ignore_eos) for row in rows
    ]
    if settings.rate is not None:
        times = poisson_arrivals(len(items), settings.rate, settings.seed)
        items = [replace(item, arrival=time) for item, time in zip(items, times, strict=True)]
    return items, 0


async def _warm_up(
    client: AsyncClient, settings: BenchSettings, items: Sequence[WorkItem], method: str
) -> None:
    options = _options(settings, method)
    for item in items[: settings.warmup]:
        await client.generate(item.prompt, options(item)).completion()


async def _run(
    client: AsyncClient,
    settings: BenchSettings,
    items: Sequence[WorkItem],
    place: tuple[int, Load, str],
    progress: Callable[[RequestRecord], None],
) -> Run:
    number, load, method = place
    options = _options(settings, method)
    if load.kind == "closed":
        records, seconds = await closed_loop(client, items, options, int(load.value), progress)
    else:
        records, seconds = await at_arrivals(client, items, options, progress)
    return Run(number, load, method, run_figures(records, seconds), records)


def _options(settings: BenchSettings, method: str) -> Callable[[WorkItem], GenerateOptions]:
    base = GenerateOptions(
        temperature=settings.temperature,
        seed=settings.seed,
        speculation=None if method == "default" else method,
        num_draft_tokens=settings.num_draft_tokens,
        acceptance_rule=settings.acceptance_rule,
        timeout=settings.timeout,
        token_ids=True,
        # A salt of its own keeps a run from finding the prompts that earlier runs left in the prefix cache.
        cache_salt="" if settings.share_prefix_cache else uuid.uuid4().hex,
    )
    return lambda item: replace(base, max_tokens=item.max_tokens, ignore_eos=item.ignore_eos)
