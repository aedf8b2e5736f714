"""Who gets how many rows in the next step: continuous batching, chunked prefill and drafts in one budget.

The budget max_batched_tokens counts every row of the step, draft rows too, and is spent in this order:
1. one row for each decoding sequence: a stream that has begun never stalls behind someone's prompt. There are
   at most as many slots as budget rows, so whoever prefills keeps at least one row per step as well;
2. prompts: first those that run already, then admissions;
3. draft tokens, out of what is left. A draft row may save one sequence a step, a prompt row always brings a
   waiting caller nearer to its first token; so drafts come last and cannot starve prefill.
Pages follow the same order. Drafts give way before anybody is preempted.

Plans may be made ahead, while steps are in flight. A sequence then gets a row behind its rows in flight, unless
they surely end it: what a prefill chunk comes to is known, and a sampling row adds one token and its accepted
drafts. Pages and limits hold for all drafts accepted, what is worth drafting is judged for none. No more than one
sampling row may be without a result: the bounds stay close, and a sequence that ends computes one row in vain.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.scheduler.counters import Counters
from scheduler_svc.scheduler.limits import Limits
from scheduler_svc.scheduler.page_allocator import PageAllocator
from scheduler_svc.scheduler.request import Sequence, SequenceState
from scheduler_svc.scheduler.rows_in_flight import RowsInFlight
from scheduler_svc.scheduler.slots import SlotTable
from scheduler_svc.scheduler.speculation_policy import (
    NO_SPECULATION,
    SpeculationDecision,
    SpeculationFacts,
    SpeculationPolicy,
)
from scheduler_svc.scheduler.speculation_settings import SpeculationSettings
from scheduler_svc.scheduler.waiting_queue import WaitingQueue
from shared_mem.enums import SpeculationMethod
from shared_mem.records import FOLLOWS


@dataclass(slots=True)
class PlannedRow:
    """One sequence's part of the step."""

    sequence: Sequence
    num_computed: int  # or FOLLOWS, see RowPlan
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
        settings: SpeculationSettings,
    ) -> None:
        self._limits = limits
        self._allocator = allocator
        self._slots = slots
        self._queue = queue
        self._policy = policy
        self._counters = counters
        self.settings = settings
        self.short_of_pages = False  # the last plan left someone waiting for pages

    def plan(self) -> list[PlannedRow]:
        """The rows of the next step; their sequences hold slots and pages for everything the step may write."""
        ready = sorted(
            (
                sequence
                for sequence in self._slots.running
                if sequence.in_flight.num_sampling <= 1 and sequence.num_remaining_tokens > 0
            ),
            key=lambda sequence: sequence.rank,
        )
        num_decoding = sum(sequence.decodes_next for sequence in ready)
        prefill_budget = self._limits.max_batched_tokens - num_decoding
        rows: list[PlannedRow] = []
        self.short_of_pages = False
        for sequence in ready:
            row = self._running_row(sequence, prefill_budget)
            if row is not None:
                rows.append(row)
                prefill_budget -= 0 if sequence.decodes_next else row.num_query
        rows += self._admissions(prefill_budget)
        self._add_speculation(rows)
        return rows

    def _running_row(self, sequence: Sequence, prefill_budget: int) -> PlannedRow | None:
        if sequence.state is not SequenceState.RUNNING:
            return None  # preempted a moment ago for someone of higher rank
        missing = sequence.num_tokens_at_least - sequence.num_computed_at_least
        num_query = 1 if sequence.decodes_next else min(missing, prefill_budget)
        if num_query <= 0 or not self._make_room(sequence, sequence.num_computed_at_most + num_query + 1):
            return None
        num_computed = FOLLOWS if sequence.in_flight.num_sampling else sequence.num_computed_at_least
        return PlannedRow(sequence, num_computed, num_query, samples=num_query == missing)

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Pages for num_tokens, preempting from the lowest rank upwards; False if the sequence has to wait.

        Rows are planned in order of rank, so a victim has no row in this plan yet.
        """
        while not self._allocator.grow(sequence, num_tokens):
            if self._pages_come_back(sequence):
                self.short_of_pages = True
                return False
            victim = max(self._slots.running, key=lambda running: running.rank)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _pages_come_back(self, sequence: Sequence) -> bool:
        """Whether results in flight will free pages, so that it is too early to preempt somebody for `sequence`.

        Nobody is preempted for a row ahead: the sequence's own result is still to come, and until then drafts
        take no more pages.
        """
        return (
            sequence.in_flight.last_step is not None
            or self._allocator.ledger.num_quarantined > 0
            or any(running.num_remaining_tokens <= 0 for running in self._slots.running)
        )

    def preempt(self, sequence: Sequence) -> None:
        """Takes slot and pages; the sequence waits in front of its priority class and is computed again.

        Its tokens are kept, and the worker's noise is keyed by position, so its text does not change.
        """
        self._allocator.release(sequence)
        self._slots.vacate(sequence)
        sequence.state = SequenceState.WAITING
        sequence.in_flight = RowsInFlight()  # their results will be dropped
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
                self.short_of_pages = True  # nobody overtakes: a large prompt would never find enough of them
                break
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
            and sibling.num_computed < shareable  # pages enter the cache with the result
            for sibling in siblings
        )

    def _admit(self, sequence: Sequence, budget: int) -> PlannedRow | None:
        """Slot and pages for a waiting sequence and its first chunk; None while there are too few pages.

        All of its tokens must fit now, beside what running prompts still need and one page for each running
        sequence: admitting more would only mean to preempt it a few steps later.
        """
        allocator, methods = self._allocator, self.followers(sequence)
        prefix = allocator.find_prefix(sequence, methods)
        wanted = allocator.pages_for(len(sequence.tokens) + 1) - len(prefix) + allocator.num_unheld(prefix)
        promised = sum(
            1 + max(0, allocator.pages_for(len(running.tokens) + 1) - len(running.pages))
            for running in self._slots.running
        )
        if wanted + promised > allocator.ledger.num_available:
            return None
        self._queue.remove(sequence)
        sequence.take_own_tokens()
        allocator.admit(sequence, prefix, methods)
        sequence.method = self.settings.method_of(sequence.request.submit.speculation)
        self._slots.assign(sequence)
        missing = len(sequence.tokens) - sequence.num_computed
        num_query = min(missing, budget)
        grown = allocator.grow(sequence, sequence.num_computed + num_query + 1)
        assert grown, "checked above"
        return PlannedRow(sequence, sequence.num_computed, num_query, num_query == missing, admitted=True)

    def followers(self, sequence: Sequence) -> int:
        """Bit mask of the drafters that would follow the sequence if it were admitted now."""
        wish = sequence.request.submit.speculation
        if wish.max_draft_tokens == 0:
            return 0
        methods = 0
        for method in self._policy.followers(self.settings.method_of(wish)):
            methods |= method.bit
        return methods

    def _add_speculation(self, rows: list[PlannedRow]) -> None:
        """Decides on drafts row by row; each gets an even share of the rows that are left."""
        left = self._limits.max_batched_tokens - sum(row.num_query for row in rows)
        drafting = [row for row in rows if row.sequence.decodes_next]
        if len(drafting) < len(rows) and not self._limits.drafts_beside_prefill:
            left = 0
        if 0 < self.settings.disable_at_batch_size <= len(self._slots):
            left = 0
        num_ahead = len(drafting)
        for row in rows:
            sequence, share = row.sequence, 0
            if sequence.decodes_next:
                share = -(-left // num_ahead)
                num_ahead -= 1
            row.speculation = self._decide(sequence, share)
            num_drafts = row.speculation.num_draft_tokens
            left -= num_drafts
            num_written = sequence.num_computed_at_most + row.num_query + num_drafts
            grown = self._allocator.grow(sequence, num_written + 1)
            assert grown, "the policy drafts no more than pages can cover"

    def _decide(self, sequence: Sequence, num_budget_rows: int) -> SpeculationDecision:
        wish, allocator = sequence.request.submit.speculation, self._allocator
        # While somebody waits for pages, drafts make do with those at hand: what they take is not back until
        # their result is, and a plan made ahead would find it taken every time.
        covered = allocator.num_covered_tokens if self.short_of_pages else allocator.num_coverable_tokens
        method = self.settings.method_of(wish)
        if method is not SpeculationMethod.DISABLED and not sequence.methods & method.bit:
            method = sequence.method  # a new default is for those who are admitted from now on
        facts = SpeculationFacts(
            method=method,
            max_draft_tokens=self.settings.draft_tokens_of(wish),
            num_tokens=sequence.num_tokens_at_least,
            decoding=sequence.decodes_next,
            num_remaining_tokens=sequence.num_remaining_tokens,
            num_budget_rows=num_budget_rows,
            num_coverable_tokens=covered(sequence),
            num_unsure_tokens=sequence.in_flight.num_draft_tokens,
            methods=sequence.methods,
        )
        decision = self._policy.decide(facts)
        assert not decision.num_draft_tokens or sequence.methods & decision.method.bit, "only followers draft"
        return decision
