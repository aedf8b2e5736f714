"""Puts one load on the service and records what comes back: closed loop, or arrivals at given times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from draftline.aio import AsyncClient
from draftline.bench.measure import RequestRecord
from draftline.bench.workload import WorkItem
from draftline.errors import DraftlineError
from draftline.options import GenerateOptions
from draftline.results import Delta, Finished, Started

Progress = Callable[[RequestRecord], None]
Options = Callable[[WorkItem], GenerateOptions]


async def closed_loop(
    client: AsyncClient, items: Sequence[WorkItem], options: Options, concurrency: int, progress: Progress
) -> tuple[list[RequestRecord], float]:
    """Keeps `concurrency` requests in flight until all items are done; returns records and seconds."""
    queue = iter(items)
    records: list[RequestRecord] = []
    start = time.perf_counter()

    async def caller() -> None:
        for item in queue:  # shared: each item goes to whoever is free
            records.append(await _request(client, item, options(item), start))
            progress(records[-1])

    await _all(caller() for _ in range(min(concurrency, len(items))))
    return records, time.perf_counter() - start


async def at_arrivals(
    client: AsyncClient, items: Sequence[WorkItem], options: Options, progress: Progress
) -> tuple[list[RequestRecord], float]:
    """Sends each item at its arrival time whatever is in flight; returns records and seconds."""
    records: list[RequestRecord] = []
    start = time.perf_counter()

    async def caller(item: WorkItem) -> None:
        await asyncio.sleep(item.arrival - (time.perf_counter() - start))
        records.append(await _request(client, item, options(item), start))
        progress(records[-1])

    await _all(caller(item) for item in items)
    return records, time.perf_counter() - start


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for coroutine in coroutines:
            group.create_task(coroutine)


async def _request(
    client: AsyncClient, item: WorkItem, options: GenerateOptions, start: float
) -> RequestRecord:
    record = RequestRecord(id=item.id, category=item.category, sent=time.perf_counter() - start)
    try:
        async with client.generate(item.prompt, options) as stream:
            async for event in stream:
                now = time.perf_counter() - start
                if isinstance(event, Delta):
                    if event.token_ids:
                        record.messages.append((now, len(event.token_ids)))
                elif isinstance(event, Started):
                    record.prompt_tokens, record.cached_tokens = event.prompt_tokens, event.cached_tokens
                else:
                    _take_totals(record, event)
    except DraftlineError as error:
        record.error = f"{error.code}/{error.reason}" if error.reason else error.code
        record.error_message = error.message
    record.ended = time.perf_counter() - start
    return record


def _take_totals(record: RequestRecord, end: Finished) -> None:
    record.finish_reason = end.finish_reason
    record.completion_tokens = end.usage.completion_tokens
    record.num_steps = end.timing.num_steps
    record.num_preemptions = end.timing.num_preemptions
    if end.speculation is not None:
        record.num_drafts = end.speculation.num_drafts
        record.num_draft_tokens = end.speculation.num_draft_tokens
        record.num_accepted_tokens = end.speculation.num_accepted_tokens
        record.num_draft_tokens_per_pos = end.speculation.num_draft_tokens_per_pos
        record.num_accepted_tokens_per_pos = end.speculation.num_accepted_tokens_per_pos
