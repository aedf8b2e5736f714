"""Planned rows as the StepPlan that goes to the workers: deltas only, so it notes what each sequence was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scheduler_svc.scheduler import request
from scheduler_svc.scheduler.batch_planner import PlannedRow
from shared_mem.records import Admission, PageUpdate, RowPlan, SamplingRecord, SlotRelease, StepPlan


def step_plan(step_id: int, planned: Sequence[PlannedRow], releases: tuple[SlotRelease, ...]) -> StepPlan:
    """The plan of a step; from now on the planned rows are in flight and their pages known to the workers."""
    admissions = tuple(_admission(row) for row in planned if row.admitted)
    updates = tuple(update for row in planned if (update := _page_update(row.sequence)) is not None)
    rows = tuple(_row(row) for row in planned)
    for row, record in zip(planned, rows, strict=True):
        row.sequence.in_flight.add(step_id, record)
    return StepPlan(step_id, releases, admissions, updates, rows)


def _row(row: PlannedRow) -> RowPlan:
    return RowPlan(
        slot=row.sequence.slot,
        epoch=row.sequence.epoch,
        num_computed=row.num_computed,
        num_query=row.num_query,
        samples=row.samples,
        method=row.speculation.method,
        num_draft_tokens=row.speculation.num_draft_tokens,
    )


def _page_update(sequence: request.Sequence) -> PageUpdate | None:
    first = sequence.num_pages_sent
    if first >= len(sequence.pages):
        return None
    sequence.num_pages_sent = len(sequence.pages)
    return PageUpdate(sequence.slot, first, np.array(sequence.pages[first:], dtype=np.int32))


def _admission(row: PlannedRow) -> Admission:
    sequence = row.sequence
    return Admission(
        slot=sequence.slot,
        epoch=sequence.epoch,
        token_ids=np.array(sequence.tokens, dtype=np.int32),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=row.num_computed,
        num_draft_cached_tokens=sequence.num_draft_computed,
        sampling=_without_delivered_prompt_logprobs(sequence),
        methods=sequence.methods,
        salt_id=sequence.request.salt_id,
    )


def _without_delivered_prompt_logprobs(sequence: request.Sequence) -> SamplingRecord:
    """After a preemption nobody needs the prompt's log-probabilities again, and hits may skip its rows."""
    sampling = sequence.sampling
    return replace(sampling, num_prompt_logprobs=-1) if sequence.started_sent else sampling
