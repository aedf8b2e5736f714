"""Drives a ModelRunner by plans of its own: continuous batching over fixed slots, without scheduler and sockets.

For work that has no clients: writing training data, measuring what a served drafter accepts, and the pure cost of the
worker. Each slot owns a fixed run of pages, so that nothing is ever preempted or shared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from gpu_worker.model_runner import ModelRunner
from shared_mem.enums import SpeculationMethod
from shared_mem.records import (
    Admission,
    PageUpdate,
    RowPlan,
    RowResult,
    SamplingRecord,
    SlotRelease,
    StepPlan,
    StepResult,
)


@dataclass(frozen=True)
class GenerationRequest:
    """One text to generate: token_ids is the prompt; it ends at max_tokens or with one of end_ids."""

    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingRecord
    end_ids: frozenset[int]
    method: SpeculationMethod = SpeculationMethod.DISABLED
    num_draft_tokens: int = 0


@dataclass(frozen=True)
class Generation:
    """What became of a request: its generated tokens, the end id included, and the drafts of each verify step."""

    request: GenerationRequest
    token_ids: tuple[int, ...]
    ended: bool  # by an end id, not by max_tokens
    steps: tuple[tuple[int, int], ...]  # (draft depth, accepted draft tokens) of each step that drafted


@dataclass
class _Running:
    request: GenerationRequest
    slot: int
    epoch: int
    num_computed: int = 0
    generated: list[int] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_known(self) -> int:
        return len(self.request.token_ids) + len(self.generated)


class BatchGenerator:
    """At most num_slots texts at a time; `step` runs one batch and gives those that ended with it."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        num_slots: int,
        page_size: int,
        num_pages: int,
        max_context_tokens: int,
        max_batched_tokens: int,
    ) -> None:
        """The runner's table and pools must be of these sizes. Raises ValueError if the pages do not fill the slots."""
        self.num_slots = num_slots
        self._runner = runner
        self._page_size = page_size
        self._pages_per_slot = -(-(max_context_tokens + 1) // page_size)
        if num_slots * self._pages_per_slot > num_pages:
            raise ValueError(
                f"num_pages: {num_pages}, {num_slots} slots of {max_context_tokens} tokens need"
                f" {num_slots * self._pages_per_slot}"
            )
        self._max_context_tokens = max_context_tokens
        self._max_batched_tokens = max_batched_tokens
        self._free = list(range(num_slots - 1, -1, -1))
        self._waiting: deque[GenerationRequest] = deque()
        self._running: dict[int, _Running] = {}  # by slot, in order of admission
        self._releases: list[SlotRelease] = []
        self._step_id = 0
        self._epoch = 0

    @property
    def num_pending(self) -> int:
        """Texts that were submitted and have not ended."""
        return len(self._waiting) + len(self._running)

    def submit(self, request: GenerationRequest) -> None:
        """Queues a text. Raises ValueError if it could outgrow the context."""
        total = len(request.token_ids) + request.max_tokens
        if not request.token_ids or total > self._max_context_tokens:
            raise ValueError(
                f"request: {len(request.token_ids)} prompt and {request.max_tokens} new tokens,"
                f" a text has 1 to {self._max_context_tokens}"
            )
        self._waiting.append(request)

    def step(self) -> list[Generation]:
        """Runs one step over everything that runs or may start; the texts that ended with it."""
        plan = self._plan()
        if not plan.rows:
            return []
        published: list[StepResult] = []
        self._runner.execute(plan, published.append)
        ended = []
        for row, result in zip(plan.rows, published[0].rows, strict=True):
            if (generation := self._take(row, result)) is not None:
                ended.append(generation)
        return ended

    def run(self) -> list[Generation]:
        """Steps until nothing is pending; all texts in the order in which they ended."""
        ended: list[Generation] = []
        while self.num_pending:
            ended += self.step()
        return ended

    def _plan(self) -> StepPlan:
        self._step_id += 1
        rows: list[RowPlan] = []
        admissions: list[Admission] = []
        updates: list[PageUpdate] = []
        releases, self._releases = tuple(self._releases), []
        room = self._max_batched_tokens
        for running in self._running.values():
            if running.num_computed == running.num_known - 1 and running.generated:
                rows.append(self._decode_row(running, room))
                room -= 1 + rows[-1].num_draft_tokens
        for running in list(self._running.values()):
            if room > 0 and not running.generated:
                rows.append(self._prefill_row(running, room))
                room -= rows[-1].num_query
        while room > 0 and self._free and self._waiting:
            running = self._start(self._waiting.popleft(), admissions, updates)
            rows.append(self._prefill_row(running, room))
            room -= rows[-1].num_query
        return StepPlan(self._step_id, releases, tuple(admissions), tuple(updates), tuple(rows))

    def _decode_row(self, running: _Running, room: int) -> RowPlan:
        n, request = running.num_known, running.request
        # at least one token is drawn by the target itself, and drafts need room in the context and in the step
        most = min(
            request.max_tokens - len(running.generated) - 1, self._max_context_tokens - n - 1, room - 1
        )
        drafts = max(0, min(request.num_draft_tokens, most))
        return RowPlan(running.slot, running.epoch, n - 1, 1, True, request.method, drafts)

    def _prefill_row(self, running: _Running, room: int) -> RowPlan:
        count = min(len(running.request.token_ids) - running.num_computed, room)
        last = running.num_computed + count == len(running.request.token_ids)
        return RowPlan(running.slot, running.epoch, running.num_computed, count, last, running.request.method)

    def _start(
        self, request: GenerationRequest, admissions: list[Admission], updates: list[PageUpdate]
    ) -> _Running:
        slot = self._free.pop()
        self._epoch += 1
        running = self._running[slot] = _Running(request, slot, self._epoch)
        token_ids = np.array(request.token_ids, dtype=np.int32)
        admissions.append(
            Admission(
                slot,
                self._epoch,
                token_ids,
                len(request.token_ids),
                0,
                0,
                request.sampling,
                sum(method.bit for method in request.method.followers(SpeculationMethod)),
            )
        )
        first = slot * self._pages_per_slot
        pages = np.arange(first, first + self._pages_per_slot, dtype=np.int32)
        updates.append(PageUpdate(slot, 0, pages))
        return running

    def _take(self, row: RowPlan, result: RowResult) -> Generation | None:
        running = self._running[row.slot]
        request = running.request
        if not row.samples:
            running.num_computed += row.num_query
            return None
        if result.draft_depth:
            running.steps.append((result.draft_depth, result.num_accepted_tokens))
        ended = False
        for token in result.token_ids.tolist():
            running.generated.append(token)
            ended = token in request.end_ids
            if ended or len(running.generated) == request.max_tokens:
                break
        running.num_computed = running.num_known - 1
        if not ended and len(running.generated) < request.max_tokens:
            return None
        del self._running[row.slot]
        self._free.append(row.slot)
        self._releases.append(SlotRelease(row.slot, running.epoch))
        return Generation(request, tuple(running.generated), ended, tuple(running.steps))
