"""What a sequence's rows without a result yet can come to: the next row is planned within these bounds."""

from __future__ import annotations

from dataclasses import dataclass

from shared_mem.records import RowPlan


@dataclass(slots=True)
class RowsInFlight:
    """Sums over one sequence's rows in flight. A sampling row adds one token, and one for each accepted draft."""

    last_step: int | None = None  # the newest of their steps
    num_query: int = 0
    num_sampling: int = 0
    num_draft_tokens: int = 0  # from none to all of them may be accepted

    def add(self, step_id: int, row: RowPlan) -> None:
        """The row goes out with a newer step than all others."""
        self.last_step = step_id
        self.num_query += row.num_query
        self.num_sampling += row.samples
        self.num_draft_tokens += row.num_draft_tokens

    def remove(self, step_id: int, row: RowPlan) -> None:
        """The oldest row's result is here."""
        if self.last_step == step_id:
            self.last_step = None
        self.num_query -= row.num_query
        self.num_sampling -= row.samples
        self.num_draft_tokens -= row.num_draft_tokens
