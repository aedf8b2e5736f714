"""Everything between a Submit and its last token: plans steps, applies their results. No I/O, no clock.

Its caller (process.py) brings messages, results and the time, and carries what comes back. Per step:
`expire`, `schedule` (the plan goes to the workers), then `apply` of the result (events go to frontends). Several
steps may be in flight: plans look ahead (batch_planner.py), results are applied in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.errors import DraftlineError, ErrorReason
from scheduler_svc.messages import (
    Abort,
    AbortReply,
    Cancel,
    LoadReply,
    Rejected,
    SetSpeculation,
    SpeculationInForce,
    Submit,
    TokenEvent,
)
from scheduler_svc.scheduler.batch_planner import BatchPlanner, PlannedRow
from scheduler_svc.scheduler.counters import Counters
from scheduler_svc.scheduler.deadlines import Deadlines
from scheduler_svc.scheduler.events import (
    Outbound,
    abort_event,
    delivered_step,
    per_frontend,
    token_event,
    token_logprobs,
)
from scheduler_svc.scheduler.limits import Limits
from scheduler_svc.scheduler.page_allocator import PageAllocator
from scheduler_svc.scheduler.page_keys import PageKeys
from scheduler_svc.scheduler.plan_records import step_plan
from scheduler_svc.scheduler.request import Request, Sequence, SequenceState, new_request
from scheduler_svc.scheduler.salt_ids import SaltIds
from scheduler_svc.scheduler.slots import SlotTable
from scheduler_svc.scheduler.speculation_policy import FixedSpeculation, SpeculationPolicy
from scheduler_svc.scheduler.speculation_settings import changed, check_loaded, initial_settings
from scheduler_svc.scheduler.stopping import find_end
from scheduler_svc.scheduler.waiting_queue import WaitingQueue
from shared_mem.enums import SpeculationMethod
from shared_mem.records import RowPlan, RowResult, StepPlan, StepResult

_RETRY_AFTER_SECONDS = 1.0


class ResultError(Exception):
    """A result that does not answer the oldest step in flight: the worker cannot be trusted any more."""


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    step_id: int
    rows: tuple[RowPlan, ...]


class Scheduler:
    """Owns every request and every KV page of one worker group."""

    def __init__(
        self, limits: Limits, policy: SpeculationPolicy | None = None, max_steps_in_flight: int = 1
    ) -> None:
        self.limits = limits
        self.counters = Counters()
        self.accepting = True  # False while draining
        self._max_steps_in_flight = max_steps_in_flight
        self._allocator = PageAllocator(
            limits.num_pages,
            limits.page_size,
            limits.max_context_tokens,
            limits.prefix_cache,
            hidden_methods=sum(
                method.bit for method, drafter in limits.drafters.items() if drafter.needs_hidden
            ),
        )
        self._slots = SlotTable(limits.max_running_requests)
        self._queue = WaitingQueue()
        self._salts = SaltIds()
        self._planner = BatchPlanner(
            limits,
            self._allocator,
            self._slots,
            self._queue,
            policy or FixedSpeculation(limits.drafters),
            self.counters,
            initial_settings(limits),
        )
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines()
        self._num_submitted = 0
        self._step_id = 0
        self._in_flight: list[_StepInFlight] = []  # oldest first

    # --- what frontends ask for ---

    def submit(self, frontend: bytes, submit: Submit) -> list[Outbound]:
        """Queues a request, or answers Rejected with the reason."""
        refusal = self._refusal(submit)
        if refusal is not None:
            return [Outbound(frontend, refusal)]
        self._num_submitted += 1
        salt_id = self._salts.id_of(submit.cache_salt)
        request = new_request(submit, frontend, self._num_submitted, self.limits, salt_id)
        self._requests[submit.request_id] = request
        for sequence in request.sequences:
            self._queue.push(sequence)
        if submit.deadline is not None:
            self._deadlines.add(request.serial, request.request_id, submit.deadline)
        return []

    def _refusal(self, submit: Submit) -> Rejected | None:
        def refuse(reason: ErrorReason, message: str, retry_after: float | None = None) -> Rejected:
            return Rejected(submit.request_id, reason, message, retry_after)

        limits, num_tokens = self.limits, len(submit.token_ids)
        if not self.accepting:
            return refuse(ErrorReason.NOT_SERVING, "the service is shutting down", _RETRY_AFTER_SECONDS)
        if submit.request_id in self._requests:
            return refuse(
                ErrorReason.DUPLICATE_REQUEST_ID, f"request_id: {submit.request_id!r} is live already"
            )
        if not 1 <= num_tokens < limits.max_context_tokens:
            return refuse(
                ErrorReason.PROMPT_TOO_LONG,
                f"prompt: {num_tokens} tokens; from 1 to {limits.max_context_tokens - 1} fit the context",
            )
        method = submit.speculation.method
        if method is not None:
            try:
                check_loaded(method, limits, "speculation.method")
            except DraftlineError as error:
                return refuse(error.reason, error.message)
        # Samples that the next plan can start do not count as queued. Each counts: it takes memory and a slot of its
        # own. A request is taken whole, so that one of many samples is not refused for ever.
        starting = 0 if self._planner.short_of_pages else self._slots.num_free
        num_queued = len(self._queue) - starting
        if num_queued >= limits.max_queued_requests:
            return refuse(
                ErrorReason.QUEUE_FULL,
                f"{num_queued} samples wait for a free slot, the limit (max_queued_requests) is "
                f"{limits.max_queued_requests}",
                _RETRY_AFTER_SECONDS,
            )
        return None

    def cancel(self, frontend: bytes, cancel: Cancel) -> None:
        """Ends samples of a frontend's own request silently; unknown ids have ended by themselves."""
        request = self._requests.get(cancel.request_id)
        if request is None or request.frontend != frontend:
            return
        for sequence in request.live_sequences:
            if cancel.index is None or cancel.index == sequence.index:
                self._end(sequence)

    def forget_frontend(self, frontend: bytes) -> None:
        """Ends all requests of a frontend that is gone."""
        for request in list(self._requests.values()):
            if request.frontend == frontend:
                self._end_all(request)

    def abort(self, frontend: bytes, abort: Abort) -> list[Outbound]:
        """Ends requests of any frontend with ABORTED and answers the caller."""
        found = [self._requests[name] for name in dict.fromkeys(abort.request_ids) if name in self._requests]
        reply = AbortReply(abort.call_id, tuple(request.request_id for request in found))
        return [*self._abort(found), Outbound(frontend, reply)]

    def abort_all(self) -> list[Outbound]:
        """Ends every request with ABORTED: the grace of a drain is over."""
        return self._abort(list(self._requests.values()))

    def reject_all(self, reason: ErrorReason, message: str) -> list[Outbound]:
        """Ends every request with a status: the workers are lost."""
        requests = list(self._requests.values())
        for request in requests:
            self._end_all(request)
        return [
            Outbound(request.frontend, Rejected(request.request_id, reason, message, _RETRY_AFTER_SECONDS))
            for request in requests
        ]

    # --- time ---

    def expire(self, now: float) -> list[Outbound]:
        """Ends requests whose deadline has passed; call it before schedule, so that none reaches a worker.

        `now` is of the clock that deadlines were given in, which need not be that of other times. Each is rejected,
        whether it ran or not: usually the call has ended by itself then, but no stream may depend on that.
        """
        rejected = []
        for request_id in self._deadlines.passed(now):
            request = self._requests[request_id]
            message = (
                f"the deadline passed while the request {'ran' if request.was_scheduled else 'was queued'}"
            )
            rejection = Rejected(request_id, ErrorReason.EXPIRED_IN_QUEUE, message)
            rejected.append(Outbound(request.frontend, rejection))
            self._end_all(request)
        return rejected

    @property
    def next_deadline(self) -> float | None:
        """When expire has something to do next, at the earliest."""
        return self._deadlines.next

    # --- steps ---

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if enough steps are in flight or nobody has anything to do."""
        if len(self._in_flight) >= self._max_steps_in_flight:
            return None
        planned = self._planner.plan()
        if not planned:
            return None
        self._step_id += 1
        for row in planned:
            if row.sequence.first_scheduled_time is None:
                self._note_first_admission(row, now)
        plan = step_plan(self._step_id, planned, self._slots.take_releases())
        self._in_flight.append(_StepInFlight(plan.step_id, plan.rows))
        return plan

    def _note_first_admission(self, row: PlannedRow, now: float) -> None:
        sequence = row.sequence
        sequence.first_scheduled_time = now
        sequence.num_cached_tokens = row.num_computed
        self.counters.num_prompt_tokens += sequence.num_prompt_tokens
        self.counters.num_cached_tokens += row.num_computed

    def apply(self, result: StepResult) -> list[Outbound]:
        """Takes over what the oldest step in flight came to; returns its token events, grouped by frontend.

        Rows of sequences that were ended or preempted meanwhile are dropped: their epoch is history.
        Raises ResultError if the result does not fit the plan.
        """
        step = self._in_flight[0] if self._in_flight else None
        if step is None or step.step_id != result.step_id:
            raise ResultError(f"result of step {result.step_id}, expected {step.step_id if step else 'none'}")
        if [(row.slot, row.epoch) for row in step.rows] != [(row.slot, row.epoch) for row in result.rows]:
            raise ResultError(f"rows of step {result.step_id} are not those of its plan")
        del self._in_flight[0]
        self._allocator.ledger.retire(step.step_id)
        self.counters.num_steps += 1
        events: list[tuple[bytes, TokenEvent]] = []
        for planned, row in zip(step.rows, result.rows, strict=True):
            sequence = self._slots.tenant(row.slot, row.epoch)
            if sequence is None:
                continue
            event = self._apply_row(step.step_id, sequence, planned, row)
            if event is not None:
                events.append((sequence.request.frontend, event))
        return per_frontend(events)

    def _apply_row(
        self, step_id: int, sequence: Sequence, planned: RowPlan, row: RowResult
    ) -> TokenEvent | None:
        num_expected = row.num_accepted_tokens + 1 if planned.samples else 0
        if len(row.token_ids) != num_expected:
            raise ResultError(f"slot {row.slot}: {len(row.token_ids)} tokens, expected {num_expected}")
        if not row.num_accepted_tokens <= row.num_draft_tokens <= planned.num_draft_tokens:
            counts = (row.num_accepted_tokens, row.num_draft_tokens, planned.num_draft_tokens)
            raise ResultError(f"slot {row.slot}: accepted, proposed, allowed drafts are {counts}")
        sequence.in_flight.remove(step_id, planned)
        sequence.num_steps += 1
        if not sequence.started_sent and row.prompt_logprobs is not None:
            sequence.prompt_logprobs += token_logprobs(row.prompt_logprobs, planned.num_query) or ()
        num_kept, end = find_end(sequence.request.end_rules, sequence.num_generated, row.token_ids.tolist())
        token_ids = row.token_ids[:num_kept].tolist()
        sequence.tokens += token_ids
        # Rows of accepted drafts computed their tokens' KV; behind an end there are no tokens.
        num_computed = sequence.num_computed + planned.num_query + row.num_accepted_tokens
        sequence.num_computed = min(num_computed, len(sequence.tokens))
        if sequence.methods & SpeculationMethod.DRAFT_MODEL.bit:
            sequence.num_draft_computed = max(sequence.num_draft_computed, row.num_draft_computed)
        self._allocator.publish(sequence)
        event = None
        if planned.samples:
            sequence.decoding = True
            step = delivered_step(row, num_kept)
            self.counters.record_delivery(step, num_kept)
            event = token_event(sequence, token_ids, step, token_logprobs(row.logprobs, num_kept), end)
        if end is None:
            self._allocator.trim(sequence)
        else:
            self._end(sequence)
        return event

    # --- ends ---

    def _end(self, sequence: Sequence) -> None:
        """Takes everything from a live sequence; steps in flight may still write its pages."""
        if sequence.state is SequenceState.RUNNING:
            self._allocator.release(sequence)
            self._slots.vacate(sequence)
        else:
            self._queue.remove(sequence)
        sequence.state = SequenceState.ENDED
        if not sequence.request.is_live:
            del self._requests[sequence.request.request_id]
            self._deadlines.discard(sequence.request.serial)

    def _end_all(self, request: Request) -> None:
        for sequence in request.live_sequences:
            self._end(sequence)

    def _abort(self, requests: list[Request]) -> list[Outbound]:
        events = []
        for request in requests:
            for sequence in request.live_sequences:
                self._end(sequence)
                events.append((request.frontend, abort_event(sequence)))
        return per_frontend(events)

    # --- for observers ---

    @property
    def num_live_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    @property
    def num_steps_in_flight(self) -> int:
        """Plans without a result yet."""
        return len(self._in_flight)

    def load(self, call_id: int, now: float) -> LoadReply:
        """The answer to a LoadQuery."""
        ledger = self._allocator.ledger
        return LoadReply(
            call_id=call_id,
            time=now,
            num_running_requests=len(self._slots),
            num_waiting_requests=self._queue.num_requests,
            num_waiting_tokens=self._num_waiting_tokens(),
            num_used_pages=ledger.num_owned,
            num_cached_pages=ledger.num_cached,
            num_generated_tokens=self.counters.num_generated_tokens,
            num_steps=self.counters.num_steps,
            num_preemptions=self.counters.num_preemptions,
            num_prompt_tokens=self.counters.num_prompt_tokens,
            num_cached_tokens=self.counters.num_cached_tokens,
            speculation=self.counters.speculation(),
        )

    def _num_waiting_tokens(self) -> int:
        """Tokens of waiting samples that no cached prefix covers; alike for those of a request that never ran."""
        total, per_prompt = 0, dict[tuple[PageKeys, bool], int]()
        for sequence in self._queue:
            alike = sequence.page_keys, sequence.reuses_prefix
            num_tokens = per_prompt.get(alike)
            if num_tokens is None:
                methods = self._planner.followers(sequence)
                num_tokens = len(sequence.tokens) - self._allocator.num_cached_tokens(sequence, methods)
                per_prompt[alike] = num_tokens
            total += num_tokens
        return total

    def check_integrity(self) -> None:
        """Recounts pages, references and the prefix tree. Raises LedgerError for what does not add up."""
        self._allocator.check(self._slots.running)

    # --- for operators ---

    def set_speculation(self, change: SetSpeculation) -> SpeculationInForce:
        """Changes speculation for steps planned from now on. Raises DraftlineError for what cannot be served.

        A sequence that runs without the new default method's drafter goes on with the one it was admitted with; all
        stop drafting where the new default is DISABLED and they asked for no method themselves.
        """
        self._planner.settings = changed(self._planner.settings, change, self.limits)
        return self.speculation_in_force(change.call_id)

    def speculation_in_force(self, call_id: int) -> SpeculationInForce:
        """The settings that the next plan will be made with."""
        settings = self._planner.settings
        return SpeculationInForce(
            call_id,
            settings.method,
            settings.max_draft_tokens,
            settings.disable_at_batch_size,
            effective_step=self._step_id + 1,
        )

    def flush_prefix_cache(self) -> int:
        """Frees every cached page that no running sequence holds; returns how many."""
        num_freed = self._allocator.ledger.num_cached
        self._allocator.cache.flush()
        return num_freed
