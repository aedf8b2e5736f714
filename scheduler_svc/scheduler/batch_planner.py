"""Who gets how many rows in the next step: continuous batching, chunked prefill and drafts in one budget.

The budget max_batched_tokens counts every row of the step, draft rows too, and is spent in this order:
1. one row for each decoding sequence: a stream that has begun never stalls behind someone's prompt. There are
   at most as many slots as budget rows, so whoever prefills keeps at least one row per step as well;
2. prompts: first those that run already, then admissions;
3. draft tokens, out of what is left. A draft row may save one sequence a step, a prompt row always brings a
   waiting caller nearer to its first token; so drafts come last and cannot starve prefill.
Pages follow the same order. Drafts give way before anybody is preempted.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.scheduler.counters import Counters
from scheduler_svc.scheduler.limits import Limits
from scheduler_svc.scheduler.page_allocator import PageAllocator
from scheduler_svc.scheduler.request import Sequence, SequenceState
from scheduler_svc.scheduler.slots import SlotTable
from scheduler_svc.scheduler.speculation_policy import (
    NO_SPECULATION,
    SpeculationDecision,
    SpeculationFacts,
    SpeculationPolicy,
)
from scheduler_svc.scheduler.waiting_queue import WaitingQueue


@dataclass(slots=True)
class PlannedRow:
    """One sequence's part of the step."""

    sequence: Sequence
    num_computed: int
    num_query: int
    samples: bool
    admitted: bool = False
    speculation: SpeculationDecision = NO_SPECULATION


class BatchPlanner:
    """Chooses rows and takes slots and pages for them; preempts when pages run out."""

    def __init__(
        self,
        limits: Limits,
        allocator: PageAllocator,
        slots: SlotTable,
        queue: WaitingQueue,
        policy: SpeculationPolicy,
        counters: Counters,
    ) -> None:
        self._limits = limits
        self._allocator = allocator
        self._slots = slots
        self._queue = queue
        self._policy = policy
        self._counters = counters
        self.short_of_pages = False  # the last plan left someone waiting though a slot was free

    def plan(self) -> list[PlannedRow]:
        """The rows of the next step; their sequences hold slots and pages for everything the step may write.

        Sequences with a step in flight are left out: what comes next for them is not known yet.
        """
        ready = sorted(
            (sequence for sequence in self._slots.running if sequence.step_in_flight is None),
            key=lambda sequence: sequence.rank,
        )
        num_decoding = sum(sequence.decoding for sequence in ready)
        prefill_budget = self._limits.max_batched_tokens - num_decoding
        rows: list[PlannedRow] = []
        for sequence in ready:
            row = self._running_row(sequence, prefill_budget)
            if row is not None:
                rows.append(row)
                prefill_budget -= 0 if sequence.decoding else row.num_query
        self.short_of_pages = False
        rows += self._admissions(prefill_budget)
        self._add_speculation(rows)
        return rows

    def _running_row(self, sequence: Sequence, prefill_budget: int) -> PlannedRow | None:
        if sequence.state is not SequenceState.RUNNING:
            return None  # preempted a moment ago for someone of higher rank
        missing = len(sequence.tokens) - sequence.num_computed
        num_query = 1 if sequence.decoding else min(missing, prefill_budget)
        if num_query <= 0 or not self._make_room(sequence, sequence.num_computed + num_query + 1):
            return None
        return PlannedRow(sequence, sequence.num_computed, num_query, samples=num_query == missing)

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Pages for num_tokens, preempting from the lowest rank upwards; False if the sequence has to wait.

        Rows are planned in order of rank, so a victim has no row in this plan yet.
        """
        while not self._allocator.grow(sequence, num_tokens):
            if self._allocator.ledger.num_quarantined:
                return False  # these come back as soon as the step in flight retires; no need to preempt
            victim = max(self._slots.running, key=lambda running: running.rank)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Takes slot and pages; the sequence waits in front of its priority class and is computed again.

        Its tokens are kept, and the worker's noise is keyed by position, so its text does not change.
        """
        self._allocator.release(sequence)
        self._slots.vacate(sequence)
        sequence.state = SequenceState.WAITING
        sequence.step_in_flight = None
        sequence.decoding = False
        if not sequence.started_sent:
            sequence.prompt_logprobs.clear()  # they are computed again from the first token on
        sequence.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._queue.push(sequence)

    def _admissions(self, budget: int) -> list[PlannedRow]:
        rows: list[PlannedRow] = []
        for sequence in self._queue:
            if budget <= 0 or not self._slots.num_free:
                break
            if self._waits_for_sibling(sequence):
                continue
            row = self._admit(sequence, budget)
            if row is None:
                self.short_of_pages = True
                break  # nobody overtakes: a large prompt would never find enough free pages
            budget -= row.num_query
            rows.append(row)
        return rows

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """Whether another sample is computing the prompt pages that this one can share in a moment."""
        siblings = sequence.request.sequences
        shareable = self._allocator.num_shareable_tokens(sequence) if len(siblings) > 1 else 0
        return any(
            sibling is not sequence
            and sibling.state is SequenceState.RUNNING
            and sibling.num_computed < shareable
            for sibling in siblings
        )

    def _admit(self, sequence: Sequence, budget: int) -> PlannedRow | None:
        """Slot and pages for a waiting sequence and its first chunk; None while there are too few pages.

        All of its tokens must fit now, beside what running prompts still need and one page for each running
        sequence: admitting more would only mean to preempt it a few steps later.
        """
        allocator = self._allocator
        prefix = allocator.find_prefix(sequence)
        wanted = allocator.pages_for(len(sequence.tokens) + 1) - len(prefix) + allocator.num_unheld(prefix)
        promised = sum(
            1 + max(0, allocator.pages_for(len(running.tokens) + 1) - len(running.pages))
            for running in self._slots.running
        )
        if wanted + promised > allocator.ledger.num_available:
            return None
        self._queue.remove(sequence)
        allocator.admit(sequence, prefix)
        self._slots.assign(sequence)
        missing = len(sequence.tokens) - sequence.num_computed
        num_query = min(missing, budget)
        grown = allocator.grow(sequence, sequence.num_computed + num_query + 1)
        assert grown, "checked above"
        return PlannedRow(sequence, sequence.num_computed, num_query, num_query == missing, admitted=True)

    def _add_speculation(self, rows: list[PlannedRow]) -> None:
        """Decides on drafts row by row; each gets an even share of the rows that are left."""
        left = self._limits.max_batched_tokens - sum(row.num_query for row in rows)
        drafting = [row for row in rows if row.sequence.decoding]
        if len(drafting) < len(rows) and not self._limits.drafts_beside_prefill:
            left = 0
        num_ahead = len(drafting)
        for row in rows:
            share = 0
            if row.sequence.decoding:
                share = -(-left // num_ahead)
                num_ahead -= 1
            row.speculation = self._decide(row.sequence, share)
            num_drafts = row.speculation.num_draft_tokens
            left -= num_drafts
            grown = self._allocator.grow(row.sequence, row.num_computed + row.num_query + num_drafts + 1)
            assert grown, "the policy drafts no more than pages can cover"

    def _decide(self, sequence: Sequence, num_budget_rows: int) -> SpeculationDecision:
        request = sequence.request
        remaining = min(
            request.submit.stopping.max_tokens - sequence.num_generated,
            self._limits.max_context_tokens - len(sequence.tokens),
        )
        facts = SpeculationFacts(
            method=request.method,
            max_draft_tokens=request.max_draft_tokens,
            num_tokens=len(sequence.tokens),
            decoding=sequence.decoding,
            num_remaining_tokens=remaining,
            num_budget_rows=num_budget_rows,
            num_coverable_tokens=self._allocator.num_coverable_tokens(sequence),
        )
        return self._policy.decide(facts)
