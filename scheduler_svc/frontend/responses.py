"""The only writer of GenerateResponse: what a sample gives, as messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import cast

from draftline.v1 import common_pb2, generation_pb2
from google.protobuf import duration_pb2

from scheduler_svc.frontend.sample_output import (
    SampleDelta,
    SampleFinished,
    SampleItem,
    SampleStarted,
    SpeculationTotals,
)
from scheduler_svc.messages import MethodCounters, TokenLogprobs
from shared_mem.enums import SpeculationMethod

# Making messages of more log-probabilities, alternatives included, would hold up other streams: it goes to a thread.
_INLINE_LOGPROBS = 2000


class ResponseWriter:
    """Builds the responses of one request."""

    def __init__(self, request_id: str, model_name: str, first_prompt_token: int) -> None:
        self._request_id = request_id
        self._model_name = model_name
        self._first_prompt_token = first_prompt_token

    async def write(self, index: int, item: SampleItem) -> generation_pb2.GenerateResponse:
        """As `build`; what takes long to build is built in a thread."""
        if _num_logprobs(item) <= _INLINE_LOGPROBS:
            return self.build(index, item)
        return await asyncio.to_thread(self.build, index, item)

    def build(self, index: int, item: SampleItem) -> generation_pb2.GenerateResponse:
        """One message about sample `index`."""
        response = generation_pb2.GenerateResponse(request_id=self._request_id, index=index)
        if isinstance(item, SampleStarted):
            response.started.CopyFrom(self._started(item))
        elif isinstance(item, SampleDelta):
            response.delta.CopyFrom(_delta(item))
        else:
            response.finished.CopyFrom(_finished(item))
        return response

    def _started(self, item: SampleStarted) -> generation_pb2.GenerationStarted:
        logprobs = []
        if item.prompt_logprobs is not None:
            # Nothing precedes the first token, so nothing says how likely it was.
            logprobs = [generation_pb2.TokenLogprob(token_id=self._first_prompt_token)]
            logprobs += _logprobs(item.prompt_logprobs)
        return generation_pb2.GenerationStarted(
            model=self._model_name,
            prompt_tokens=item.prompt_tokens,
            cached_tokens=item.cached_tokens,
            prompt_logprobs=logprobs,
        )


def method_value(method: SpeculationMethod) -> common_pb2.SpeculationMethod:
    """The method in the protocol's enum, whose numbers are the same."""
    return cast(common_pb2.SpeculationMethod, int(method))


def speculation_stats(counters: SpeculationTotals | MethodCounters) -> common_pb2.SpeculationStats:
    """Counters of one sample, or of one method since the service's start."""
    return common_pb2.SpeculationStats(
        method=method_value(counters.method),
        num_drafts=counters.num_drafts,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_tokens=counters.num_accepted_tokens,
        num_draft_tokens_per_pos=counters.num_draft_tokens_per_pos,
        num_accepted_tokens_per_pos=counters.num_accepted_tokens_per_pos,
    )


def duration(seconds: float) -> duration_pb2.Duration:
    """Seconds as protobuf has them."""
    message = duration_pb2.Duration()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


def _delta(item: SampleDelta) -> generation_pb2.TokenDelta:
    steps = [
        generation_pb2.SpeculationStep(
            draft_tokens=step.num_draft_tokens,
            accepted_tokens=step.num_accepted_tokens,
            method=method_value(step.method),
        )
        for step in item.steps
    ]
    return generation_pb2.TokenDelta(
        text=item.text, token_ids=item.token_ids, logprobs=_logprobs(item.logprobs), speculation_steps=steps
    )


def _num_logprobs(item: SampleItem) -> int:
    """About how many log-probabilities the item's message holds, alternatives included."""
    logprobs: Sequence[TokenLogprobs] = ()
    if isinstance(item, SampleStarted):
        logprobs = item.prompt_logprobs or ()
    elif isinstance(item, SampleDelta):
        logprobs = item.logprobs
    return len(logprobs) * (1 + len(logprobs[0].top)) if logprobs else 0


def _logprobs(logprobs: Iterable[TokenLogprobs]) -> list[generation_pb2.TokenLogprob]:
    return [
        generation_pb2.TokenLogprob(
            token_id=each.token_id,
            logprob=each.logprob,
            top=[
                generation_pb2.TopLogprob(token_id=token_id, logprob=logprob)
                for token_id, logprob in each.top
            ],
        )
        for each in logprobs
    ]


def _finished(item: SampleFinished) -> generation_pb2.GenerationFinished:
    timing = generation_pb2.RequestTiming(
        queue=None if item.queue_seconds is None else duration(item.queue_seconds),
        time_to_first_token=None if item.first_token_seconds is None else duration(item.first_token_seconds),
        total=duration(item.total_seconds),
        num_steps=item.num_steps,
        num_preemptions=item.num_preemptions,
    )
    return generation_pb2.GenerationFinished(
        finish_reason=cast(generation_pb2.FinishReason, int(item.reason)),
        stop=item.stop,
        stop_token_id=item.stop_token_id,
        usage=generation_pb2.Usage(
            prompt_tokens=item.prompt_tokens,
            cached_tokens=item.cached_tokens,
            completion_tokens=item.completion_tokens,
        ),
        speculation=None if item.speculation is None else speculation_stats(item.speculation),
        timing=timing,
    )
