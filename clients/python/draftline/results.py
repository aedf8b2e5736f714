"""What a generation gives back: the events of its stream and the completion they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from google.protobuf import duration_pb2

from draftline.errors import InternalError
from draftline.labels import FINISH_REASONS, METHODS, label_of
from draftline.v1 import common_pb2, generation_pb2


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative and its log-probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability (None for the first prompt token) and alternatives, best first."""

    token_id: int
    logprob: float | None
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class SpeculationStep:
    """One draft-and-verify round: who drafted (a label, "off" for nobody), tokens proposed, tokens kept."""

    method: str
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counters of one sample or method; counts only, so that they can be added up."""

    method: str
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_draft_tokens_per_pos: tuple[int, ...]
    num_accepted_tokens_per_pos: tuple[int, ...]

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens per draft token; 0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a step that carried a draft: 1 + accepted / drafts; 1 when nothing was drafted."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; cached_tokens are the prompt's tokens found in the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Server-side seconds from the request's arrival, and counts of target steps and preemptions."""

    queue: float
    time_to_first_token: float
    total: float
    num_steps: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Started:
    """First event of a sample, sent with its first token."""

    request_id: str
    index: int
    model: str
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one or more steps; concatenated deltas are the whole output."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    speculation_steps: tuple[SpeculationStep, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a sample. matched_stop: the stop string or stop token id, if finish_reason is "stop"."""

    request_id: str
    index: int
    finish_reason: str
    matched_stop: str | int | None
    usage: Usage
    speculation: SpeculationStats | None
    timing: Timing


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished sample."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    matched_stop: str | int | None
    usage: Usage
    speculation: SpeculationStats | None
    timing: Timing


@dataclass(frozen=True, slots=True)
class Completion:
    """All samples of a request in order of their index; the properties are those of the first."""

    request_id: str
    model: str
    prompt_logprobs: tuple[TokenLogprob, ...]
    samples: tuple[Sample, ...]

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first sample, if they were asked for."""
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Finish reason of the first sample."""
        return self.samples[0].finish_reason

    @property
    def usage(self) -> Usage:
        """Token counts of the first sample."""
        return self.samples[0].usage

    @property
    def speculation(self) -> SpeculationStats | None:
        """Speculation counters of the first sample."""
        return self.samples[0].speculation

    @property
    def timing(self) -> Timing:
        """Timing of the first sample."""
        return self.samples[0].timing


@dataclass
class CompletionBuilder:
    """Adds up the events of one stream."""

    started: dict[int, Started] = field(default_factory=dict)
    deltas: dict[int, list[Delta]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Takes the next event."""
        if isinstance(event, Started):
            self.started[event.index] = event
        elif isinstance(event, Delta):
            self.deltas.setdefault(event.index, []).append(event)
        else:
            self.finished[event.index] = event

    def completion(self) -> Completion:
        """What the events add up to. Raises InternalError if a sample has begun but not finished."""
        unfinished = (set(self.started) | set(self.deltas)) - set(self.finished)
        if unfinished or not self.finished:
            sample = min(unfinished, default=0)
            raise InternalError(f"the stream ended well but without the end of sample {sample}")
        first = self.started.get(0)
        return Completion(
            request_id=next(iter(self.finished.values())).request_id,
            model=first.model if first else "",
            prompt_logprobs=first.prompt_logprobs if first else (),
            samples=tuple(self._sample(index) for index in sorted(self.finished)),
        )

    def _sample(self, index: int) -> Sample:
        deltas, end = self.deltas.get(index, []), self.finished[index]
        return Sample(
            index=index,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            finish_reason=end.finish_reason,
            matched_stop=end.matched_stop,
            usage=end.usage,
            speculation=end.speculation,
            timing=end.timing,
        )


def event_from(response: generation_pb2.GenerateResponse) -> Event:
    """The typed event of one message. Raises InternalError if it carries none of the three."""
    head = (response.request_id, response.index)
    kind = response.WhichOneof("event")
    if kind == "delta":
        delta = response.delta
        steps = tuple(
            SpeculationStep(label_of(METHODS, step.method), step.draft_tokens, step.accepted_tokens)
            for step in delta.speculation_steps
        )
        return Delta(*head, delta.text, tuple(delta.token_ids), _logprobs(delta.logprobs), steps)
    if kind == "started":
        started = response.started
        prompt_logprobs = _logprobs(started.prompt_logprobs)
        return Started(*head, started.model, started.prompt_tokens, started.cached_tokens, prompt_logprobs)
    if kind == "finished":
        return _finished(head, response.finished)
    raise InternalError(f"request {response.request_id}: a message without an event this client knows")


def stats_from(stats: common_pb2.SpeculationStats) -> SpeculationStats:
    """The typed counters of one message."""
    return SpeculationStats(
        method=label_of(METHODS, stats.method),
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_draft_tokens_per_pos=tuple(stats.num_draft_tokens_per_pos),
        num_accepted_tokens_per_pos=tuple(stats.num_accepted_tokens_per_pos),
    )


def seconds(duration: duration_pb2.Duration) -> float:
    """A protobuf duration in seconds."""
    return float(duration.seconds + duration.nanos / 1e9)


def _finished(head: tuple[str, int], end: generation_pb2.GenerationFinished) -> Finished:
    matched = end.WhichOneof("matched_stop")
    timing = end.timing
    return Finished(
        *head,
        finish_reason=label_of(FINISH_REASONS, end.finish_reason),
        matched_stop=getattr(end, matched) if matched else None,
        usage=Usage(end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.completion_tokens),
        speculation=stats_from(end.speculation) if end.HasField("speculation") else None,
        timing=Timing(
            queue=seconds(timing.queue),
            time_to_first_token=seconds(timing.time_to_first_token),
            total=seconds(timing.total),
            num_steps=timing.num_steps,
            num_preemptions=timing.num_preemptions,
        ),
    )


def _logprobs(entries: Iterable[generation_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            entry.token_id,
            entry.logprob if entry.HasField("logprob") else None,
            tuple(TopLogprob(top.token_id, top.logprob) for top in entry.top),
        )
        for entry in entries
    )
