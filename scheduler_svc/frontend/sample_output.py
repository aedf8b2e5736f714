"""One sample from token events to what is sent: cuts at stop strings, counts usage, speculation and time."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.frontend.text_stream import TextStream
from scheduler_svc.messages import Step, TokenEvent, TokenLogprobs
from scheduler_svc.metrics import FrontendMetrics
from shared_mem.enums import FinishReason, SpeculationMethod


@dataclass(frozen=True)
class OutputWishes:
    """GenerateRequest.output and the text ends, as far as a sample needs them."""

    send_text: bool
    send_token_ids: bool
    send_logprobs: bool
    send_speculation_steps: bool
    special_tokens: bool
    min_tokens_per_message: int
    min_tokens: int
    stops: tuple[str, ...]
    include_stop: bool


@dataclass(frozen=True)
class SampleStarted:
    """First output of a sample."""

    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...] | None  # of prompt tokens 2..n


@dataclass(frozen=True)
class VerifiedStep:
    """One verification step, as far as the output goes; `method` is DISABLED when nothing was drafted."""

    method: SpeculationMethod
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass
class SampleDelta:
    """What one message adds; two of them in a row can be sent as one."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    steps: list[VerifiedStep] = field(default_factory=list)

    @property
    def size(self) -> int:
        """About how many bytes its message takes."""
        per_logprob = 8 * (1 + len(self.logprobs[0].top)) if self.logprobs else 0
        return (
            len(self.text) + 3 * len(self.token_ids) + 6 * len(self.steps) + per_logprob * len(self.logprobs)
        )

    def extend(self, later: SampleDelta) -> None:
        """Appends what a later delta adds."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.steps += later.steps


@dataclass
class SpeculationTotals:
    """Counts of one sample; positions are depths in the draft tree."""

    method: SpeculationMethod = SpeculationMethod.DISABLED
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def add(self, step: Step, num_accepted_tokens: int) -> None:
        """Counts a step with drafts, of which `num_accepted_tokens` are part of the output."""
        self.method = step.method
        self.num_drafts += 1
        self.num_draft_tokens += step.num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        missing = step.draft_depth - len(self.num_draft_tokens_per_pos)
        self.num_draft_tokens_per_pos += [0] * missing
        self.num_accepted_tokens_per_pos += [0] * missing
        for position in range(step.draft_depth):
            self.num_draft_tokens_per_pos[position] += 1
        for position in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[position] += 1


@dataclass(frozen=True)
class SampleFinished:
    """Last output of a sample. Durations are seconds since arrival, None for what did not happen."""

    reason: FinishReason
    stop: str | None
    stop_token_id: int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    speculation: SpeculationTotals | None
    queue_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float
    num_steps: int
    num_preemptions: int


SampleItem = SampleStarted | SampleDelta | SampleFinished


class SampleOutput:
    """Accepts the events of one sample in order and says what to send."""

    def __init__(
        self,
        wishes: OutputWishes,
        text: TextStream,
        prompt_tokens: int,
        arrival_time: float,
        metrics: FrontendMetrics,
    ) -> None:
        self._wishes = wishes
        self._text = text
        self._prompt_tokens = prompt_tokens
        self._arrival_time = arrival_time
        self._metrics = metrics
        self._pending = SampleDelta()
        self._num_pending_tokens = 0
        self._speculation = SpeculationTotals()
        self._cached_tokens = 0
        self._started = False
        self._completion_tokens = 0
        self._first_scheduled_time: float | None = None
        self._first_token_time: float | None = None
        self._last_token_time: float | None = None
        self.finished = False
        self.ended_by_stop_string = False  # before the scheduler ended it: it must be told

    def accept(self, event: TokenEvent, now: float) -> list[SampleItem]:
        """What this event, received at time `now`, gives to send; nothing once the sample has finished."""
        if self.finished:
            return []
        items: list[SampleItem] = []
        if event.started is not None and not self._started:
            self._cached_tokens = event.started.num_cached_tokens
            self._first_scheduled_time = event.started.first_scheduled_time
            items.append(self._start(event.started.prompt_logprobs))
        stop = self._take_tokens(event, now)
        if stop is None and event.finished is None:
            if self._num_pending_tokens >= max(1, self._wishes.min_tokens_per_message):
                self._move_pending(items)
            return items
        if not self._started:  # ended in the queue
            items.append(self._start(None))
        if stop is None:
            self._add_text(self._text.finish())
        self._move_pending(items)
        items.append(self._finish(event, stop, now))
        return items

    def _start(self, prompt_logprobs: tuple[TokenLogprobs, ...] | None) -> SampleStarted:
        self._started = True
        return SampleStarted(self._prompt_tokens, self._cached_tokens, prompt_logprobs)

    def _take_tokens(self, event: TokenEvent, now: float) -> str | None:
        """Adds the event's tokens up to the one that completes a stop string; returns that string."""
        taken = 0
        stop = None
        for token_id in event.token_ids:
            taken += 1
            stop = self._take_token(token_id, event, is_last=taken == len(event.token_ids))
            if stop is not None:
                break
        if taken:
            self._count_tokens(taken, now)
            if self._wishes.send_token_ids:
                self._pending.token_ids += event.token_ids[:taken]
            if self._wishes.send_logprobs and event.logprobs is not None:
                self._pending.logprobs += event.logprobs[:taken]
        if event.step is not None:
            self._count_step(event.step, taken)
        return stop

    def _take_token(self, token_id: int, event: TokenEvent, is_last: bool) -> str | None:
        self._completion_tokens += 1
        finished = event.finished
        keep_special = False
        if finished is not None and is_last:
            if finished.reason is FinishReason.EOS and not self._wishes.special_tokens:
                return None
            if finished.reason is FinishReason.STOP and finished.stop_token_id == token_id:
                if not self._wishes.include_stop:
                    return None
                keep_special = True
        may_stop = self._completion_tokens > self._wishes.min_tokens
        text, stop = self._text.push(token_id, may_stop=may_stop, keep_special=keep_special)
        self._add_text(text)
        return stop

    def _add_text(self, text: str) -> None:
        if self._wishes.send_text:
            self._pending.text += text

    def _count_tokens(self, count: int, now: float) -> None:
        self._num_pending_tokens += count
        if self._first_token_time is None or self._last_token_time is None:
            self._first_token_time = now
            self._metrics.sample_started(self._prompt_tokens, self._cached_tokens, now - self._arrival_time)
            self._metrics.tokens_generated(count, None)
        else:
            self._metrics.tokens_generated(count, now - self._last_token_time)
        self._last_token_time = now

    def _count_step(self, step: Step, num_tokens: int) -> None:
        """Drafts behind a stop that completes inside an accepted run are no output, so they do not count."""
        accepted = min(step.num_accepted_tokens, num_tokens)
        if step.num_draft_tokens > 0:
            self._speculation.add(step, accepted)
            self._metrics.step_verified(step.method.label, step.num_draft_tokens, accepted)
        if self._wishes.send_speculation_steps:
            method = step.method if step.num_draft_tokens > 0 else SpeculationMethod.DISABLED
            self._pending.steps.append(VerifiedStep(method, step.num_draft_tokens, accepted))

    def _move_pending(self, items: list[SampleItem]) -> None:
        pending = self._pending
        if pending.text or pending.token_ids or pending.logprobs or pending.steps:
            items.append(pending)
            self._pending = SampleDelta()
        self._num_pending_tokens = 0

    def _finish(self, event: TokenEvent, stop: str | None, now: float) -> SampleFinished:
        self.finished = True
        self.ended_by_stop_string = event.finished is None
        if stop is not None or event.finished is None:
            reason, stop_token_id = FinishReason.STOP, None
        else:
            reason, stop_token_id = event.finished.reason, event.finished.stop_token_id
        totals = event if event.finished is None else event.finished
        return SampleFinished(
            reason=reason,
            stop=stop,
            stop_token_id=stop_token_id,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            speculation=self._speculation if self._speculation.num_drafts else None,
            queue_seconds=self._since_arrival(self._first_scheduled_time),
            first_token_seconds=self._since_arrival(self._first_token_time),
            total_seconds=max(0.0, (self._last_token_time or now) - self._arrival_time),
            num_steps=totals.num_steps,
            num_preemptions=totals.num_preemptions,
        )

    def _since_arrival(self, time: float | None) -> float | None:
        return None if time is None else max(0.0, time - self._arrival_time)
