"""The requests of a benchmark: prompts from a JSONL file, arrival times for an open loop."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.options import Chat, Message, Prompt


class WorkloadError(Exception):
    """A prompts or trace file cannot be used; the message names file, line and fault."""


@dataclass(frozen=True)
class WorkItem:
    """One request to send. arrival: seconds after the run's start, ignored in a closed loop."""

    id: str
    category: str
    prompt: Prompt
    max_tokens: int
    ignore_eos: bool
    arrival: float = 0.0


@dataclass(frozen=True)
class PromptRow:
    """One row of the prompts file; text is what the user says, without a chat template."""

    id: str
    category: str
    prompt: Prompt
    text: str


def read_prompts(path: Path, limit: int | None = None) -> list[PromptRow]:
    """Rows {id, category, turns} (the first turn becomes a chat message) or {prompt} (raw text).

    Files are often sorted by category: with a limit the rows are taken evenly spread over the file, in its order.
    Raises WorkloadError for an unreadable file, a row of another form, or a file without rows.
    """
    rows: list[PromptRow] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_row(path, number, line))
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: not UTF-8: {error}") from error
    if not rows:
        raise WorkloadError(f"{path}: no prompts")
    if limit is None or limit >= len(rows):
        return rows
    return [rows[i * len(rows) // limit] for i in range(limit)]


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """`count` arrival times (seconds, the first at 0) of a Poisson process of `rate` per second."""
    generator = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += generator.expovariate(rate)
    return times


def _row(path: Path, number: int, line: str) -> PromptRow:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{path}:{number}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise WorkloadError(f"{path}:{number}: not an object")
    row_id, category = str(row.get("id", number - 1)), str(row.get("category", ""))
    text, turns = row.get("prompt"), row.get("turns")
    if isinstance(text, str):
        return PromptRow(row_id, category, text, text)
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return PromptRow(row_id, category, Chat((Message("user", turns[0]),)), turns[0])
    raise WorkloadError(f"{path}:{number}: neither `turns` (a list of texts) nor `prompt` (a text)")
