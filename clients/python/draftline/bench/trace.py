"""Replays a trace of real traffic: its arrival times and lengths, with prompts of those lengths."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from draftline.bench.workload import WorkItem, WorkloadError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class TraceRow:
    """One request: seconds since the first one, prompt and output tokens."""

    arrival: float
    context_tokens: int
    generated_tokens: int


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """Rows of a CSV file with the columns TIMESTAMP, ContextTokens, GeneratedTokens.

    TIMESTAMP is an ISO date and time, or seconds. Raises WorkloadError naming the line for anything else, and
    for a file without rows.
    """
    rows: list[TraceRow] = []
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise WorkloadError(f"{path}: no column {missing[0]}")
            first: float | None = None
            for record in reader:
                if limit is not None and len(rows) >= limit:
                    break
                try:
                    time = _seconds(record["TIMESTAMP"])
                    context, generated = int(record["ContextTokens"]), int(record["GeneratedTokens"])
                except (TypeError, ValueError) as error:
                    raise WorkloadError(f"{path}:{reader.line_num}: {error}") from error
                first = time if first is None else first
                rows.append(TraceRow(time - first, context, generated))
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: not UTF-8: {error}") from error
    if not rows:
        raise WorkloadError(f"{path}: no rows")
    return rows


def trace_items(
    rows: Sequence[TraceRow],
    token_pool: Sequence[int],
    *,
    speed: float,
    max_prompt_tokens: int,
    max_context_tokens: int,
    seed: int,
) -> tuple[list[WorkItem], int]:
    """The requests of a trace and how many of them were clipped to the model's limits.

    Prompts are cut from `token_pool` (ids of real text, read as a ring) at places drawn with `seed`, so that
    they share no prefix by design; where both lengths do not fit the context, the prompt gives way first.
    """
    generator = random.Random(seed)
    items, num_clipped = [], 0
    for number, row in enumerate(rows):
        wanted = (max(1, row.context_tokens), max(1, row.generated_tokens))
        generated = min(wanted[1], max_context_tokens - 1)
        context = min(wanted[0], max_prompt_tokens, max_context_tokens - generated)
        num_clipped += (context, generated) != wanted
        start = generator.randrange(len(token_pool))
        items.append(
            WorkItem(
                id=str(number),
                category="trace",
                prompt=_ring_slice(token_pool, start, context),
                max_tokens=generated,
                ignore_eos=True,
                arrival=row.arrival / speed,
            )
        )
    return items, num_clipped


def _ring_slice(pool: Sequence[int], start: int, length: int) -> list[int]:
    return [pool[(start + offset) % len(pool)] for offset in range(length)]


def _seconds(timestamp: str) -> float:
    try:
        return float(timestamp)
    except ValueError:
        return datetime.fromisoformat(timestamp).timestamp()
