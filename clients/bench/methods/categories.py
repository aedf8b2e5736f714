"""Adds requests up by category: acceptance by position, acceptance length; and how fast they were decoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from draftline.bench.measure import RequestRecord

ALL = "all"


@dataclass
class Tally:
    """Sums over the requests of one category."""

    num_requests: int = 0
    num_errors: int = 0
    completion_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted: list[int] = field(default_factory=list)  # by draft position
    accepted: list[int] = field(default_factory=list)

    def add(self, record: RequestRecord) -> None:
        """One request more; failed ones are only counted."""
        self.num_requests += 1
        if record.error:
            self.num_errors += 1
            return
        self.completion_tokens += record.completion_tokens
        self.num_steps += record.num_steps
        self.num_drafts += record.num_drafts
        self.num_draft_tokens += record.num_draft_tokens
        self.num_accepted_tokens += record.num_accepted_tokens
        self.drafted = _sums(self.drafted, record.num_draft_tokens_per_pos)
        self.accepted = _sums(self.accepted, record.num_accepted_tokens_per_pos)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens of a step that carried a draft, on average."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of a step of the target, prefill steps and steps without a draft included."""
        return self.completion_tokens / self.num_steps if self.num_steps else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Of the steps that proposed a token at position i, the share that kept it (and all before it)."""
        return [
            kept / proposed for kept, proposed in zip(self.accepted, self.drafted, strict=True) if proposed
        ]


def by_category(records: Iterable[RequestRecord]) -> dict[str, Tally]:
    """A tally per category (what stands before a slash), those of all requests under ALL first."""
    tallies: dict[str, Tally] = {ALL: Tally()}
    for record in records:
        category = record.category.partition("/")[0] or "none"
        for name in (ALL, category):
            tallies.setdefault(name, Tally()).add(record)
    return tallies


def decode_speed(records: Iterable[RequestRecord]) -> float | None:
    """Tokens per second of a sequence, on average over all tokens behind the first ones; None without any."""
    waits = [wait for record in records if not record.error for wait in record.inter_token_seconds()]
    return len(waits) / sum(waits) if waits and sum(waits) else None


def _sums(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
