"""Shapes what frontends are told: tokens, log-probabilities, ends; one TokenEvents per frontend and step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.messages import (
    Finished,
    SchedulerMessage,
    Started,
    Step,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
)
from scheduler_svc.scheduler.request import Sequence
from scheduler_svc.scheduler.stopping import End
from shared_mem.enums import FinishReason, SpeculationMethod
from shared_mem.records import Logprobs, RowResult


@dataclass(frozen=True, slots=True)
class Outbound:
    """A message and the frontend that it goes to."""

    frontend: bytes
    message: SchedulerMessage


def token_logprobs(logprobs: Logprobs | None, num_tokens: int) -> tuple[TokenLogprobs, ...] | None:
    """The first num_tokens rows of a record (column 0: the token itself; then alternatives, best first)."""
    if logprobs is None:
        return None
    return tuple(
        TokenLogprobs(ids[0], values[0], tuple(zip(ids[1:], values[1:], strict=True)))
        for ids, values in zip(
            logprobs.token_ids[:num_tokens].tolist(), logprobs.values[:num_tokens].tolist(), strict=True
        )
    )


def delivered_step(row: RowResult, num_kept: int) -> Step:
    """What a step counts for when num_kept of its tokens are delivered: usage and metrics agree."""
    if row.num_draft_tokens == 0:
        return Step(SpeculationMethod.DISABLED, 0, 0, 0)
    return Step(row.method, row.num_draft_tokens, row.draft_depth, min(row.num_accepted_tokens, num_kept))


def token_event(
    sequence: Sequence,
    token_ids: list[int],
    step: Step,
    logprobs: tuple[TokenLogprobs, ...] | None,
    end: End | None,
) -> TokenEvent:
    """The event of one sampling row; marks the sequence as started."""
    started = None
    if not sequence.started_sent:
        assert sequence.first_scheduled_time is not None, "tokens come from scheduled sequences"
        started = Started(
            num_cached_tokens=sequence.num_cached_tokens,
            first_scheduled_time=sequence.first_scheduled_time,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if sequence.gives_prompt_logprobs else None,
        )
        sequence.started_sent = True
        sequence.prompt_logprobs = []
    return TokenEvent(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_ids=tuple(token_ids),
        step=step,
        logprobs=logprobs,
        started=started,
        finished=None if end is None else _finished(sequence, end),
        num_steps=sequence.num_steps,
        num_preemptions=sequence.num_preemptions,
    )


def abort_event(sequence: Sequence) -> TokenEvent:
    """The last event of a sequence that was aborted; it may be the only one."""
    return TokenEvent(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_ids=(),
        finished=_finished(sequence, End(FinishReason.ABORTED)),
        num_steps=sequence.num_steps,
        num_preemptions=sequence.num_preemptions,
    )


def per_frontend(events: Iterable[tuple[bytes, TokenEvent]]) -> list[Outbound]:
    """Groups the events of one step by frontend, in order."""
    grouped: dict[bytes, list[TokenEvent]] = {}
    for frontend, event in events:
        grouped.setdefault(frontend, []).append(event)
    return [Outbound(frontend, TokenEvents(tuple(group))) for frontend, group in grouped.items()]


def _finished(sequence: Sequence, end: End) -> Finished:
    return Finished(end.reason, end.stop_token_id, sequence.num_steps, sequence.num_preemptions)
