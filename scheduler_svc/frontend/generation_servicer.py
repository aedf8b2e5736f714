"""draftline.v1.GenerationService: requests in, their streams out."""

from __future__ import annotations

import asyncio
import time

import grpc.aio
from draftline.v1 import generation_pb2

from scheduler_svc.errors import DraftlineError, ErrorReason, InvalidFieldError
from scheduler_svc.frontend import checks
from scheduler_svc.frontend.convert import GenerationCall, check_model, read_generate
from scheduler_svc.frontend.generation_stream import GenerationStream
from scheduler_svc.frontend.prompt import read_prompt
from scheduler_svc.frontend.responses import ResponseWriter
from scheduler_svc.frontend.sample_output import SampleOutput
from scheduler_svc.frontend.scheduler_client import SchedulerClient
from scheduler_svc.frontend.service_state import ServedModel, ServiceState
from scheduler_svc.frontend.text_stream import TextStream
from scheduler_svc.metrics import FrontendMetrics

_MAX_ABORT_IDS = 10_000
_MAX_DETOKENIZE_IDS = 1_000_000


class GenerationServicer:
    """Handlers. Errors leave them as DraftlineError; interceptors.py makes statuses of them."""

    def __init__(self, state: ServiceState, scheduler: SchedulerClient, metrics: FrontendMetrics) -> None:
        self._state = state
        self._scheduler = scheduler
        self._metrics = metrics
        self._live: set[GenerationStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams started, deltas and finished of every sample."""
        arrival_time = time.time()
        remaining = context.time_remaining()
        deadline = None if remaining is None else arrival_time + remaining
        served = self._state.require_serving()
        call = await read_generate(request, served.model, served.tokenizer, arrival_time, deadline)
        served = self._state.require_serving()  # reading a long prompt takes time, in which a drain may begin
        stream = self._open(call, served)
        writer = ResponseWriter(call.submit.request_id, served.model.name, call.submit.token_ids[0])
        try:
            await self._scheduler.submit(call.submit, stream)
            while (item := await stream.get()) is not None:
                await context.write(await writer.write(*item))
        finally:
            # Also for a caller that is gone: that arrives as CancelledError, in any of the lines above.
            self._scheduler.release(stream.request_id, stream)
            self._live.discard(stream)
            if not self._live:
                self._idle.set()

    async def Abort(
        self, request: generation_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.AbortResponse:
        """Ends requests by id; their streams get FINISH_REASON_ABORTED from the scheduler."""
        if len(request.request_ids) > _MAX_ABORT_IDS:
            raise InvalidFieldError(
                "request_ids", f"{len(request.request_ids)} ids are above {_MAX_ABORT_IDS}"
            )
        reply = await self._scheduler.abort(tuple(request.request_ids))
        return generation_pb2.AbortResponse(aborted_request_ids=reply.aborted_request_ids)

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.TokenizeResponse:
        """The prompt's ids, by the same code as Generate's."""
        served = self._state.require_model()
        check_model(request.model, served.model)
        ids = await read_prompt(
            request.prompt, served.tokenizer, served.model.vocab_size, served.model.max_prompt_tokens
        )
        return generation_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.DetokenizeResponse:
        """The text of ids."""
        served = self._state.require_model()
        check_model(request.model, served.model)
        if len(request.token_ids) > _MAX_DETOKENIZE_IDS:
            raise InvalidFieldError(
                "token_ids", f"{len(request.token_ids)} ids are above {_MAX_DETOKENIZE_IDS}"
            )
        ids = checks.token_ids("token_ids", request.token_ids, served.model.vocab_size)
        text = await asyncio.to_thread(
            served.tokenizer.decode, list(ids), special_tokens=request.special_tokens
        )
        return generation_pb2.DetokenizeResponse(text=text)

    async def drain(self, grace_seconds: float) -> None:
        """Returns when no stream is left; those still open after the grace end UNAVAILABLE."""
        try:
            await asyncio.wait_for(self._idle.wait(), grace_seconds)
        except TimeoutError:
            error = DraftlineError(
                ErrorReason.NOT_SERVING, "the service shut down before the request was done"
            )
            for stream in list(self._live):
                stream.fail(error)

    def _open(self, call: GenerationCall, served: ServedModel) -> GenerationStream:
        """The request's stream, counted as live from here on."""
        samples = []
        for _ in call.submit.seeds:
            detokenizer = served.tokenizer.detokenizer(special_tokens=call.wishes.special_tokens)
            text = TextStream(detokenizer, call.wishes.stops, call.wishes.include_stop)
            samples.append(
                SampleOutput(
                    call.wishes, text, len(call.submit.token_ids), call.submit.arrival_time, self._metrics
                )
            )
        stream = GenerationStream(call.submit.request_id, samples, self._scheduler.cancel_sample)
        self._live.add(stream)
        self._idle.clear()
        return stream
