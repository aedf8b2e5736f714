"""draftline.v1.InfoService: what is served, by whom, and how busy it is."""

from __future__ import annotations

import importlib.metadata
import math

import grpc.aio
from draftline.v1 import common_pb2, info_pb2
from google.protobuf import timestamp_pb2

from scheduler_svc.frontend.convert import check_model
from scheduler_svc.frontend.responses import duration, method_value, speculation_stats
from scheduler_svc.frontend.scheduler_client import SchedulerClient
from scheduler_svc.frontend.service_state import ServiceState

_STATES = {
    "starting": info_pb2.SERVING_STATE_STARTING,
    "serving": info_pb2.SERVING_STATE_SERVING,
    "draining": info_pb2.SERVING_STATE_DRAINING,
    "failed": info_pb2.SERVING_STATE_FAILED,
}


class InfoServicer:
    """Handlers of read-only questions."""

    def __init__(self, state: ServiceState, scheduler: SchedulerClient) -> None:
        self._state = state
        self._scheduler = scheduler
        self._version = importlib.metadata.version("draftline")

    async def GetModelInfo(
        self, request: info_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> info_pb2.GetModelInfoResponse:
        """Facts of the model, from the scheduler's last status."""
        served = self._state.require_model()
        model = served.model
        check_model(request.model, model)
        defaults = common_pb2.SamplingParams(
            temperature=model.default_temperature,
            top_k=model.default_top_k,
            top_p=model.default_top_p,
            min_p=model.default_min_p,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=model.default_repetition_penalty,
        )
        return info_pb2.GetModelInfoResponse(
            model=model.name,
            model_path=model.model_path,
            revision=model.revision,
            architecture=model.architecture,
            dtype=model.dtype,
            kv_cache_dtype=model.kv_cache_dtype,
            max_context_tokens=model.max_context_tokens,
            max_prompt_tokens=model.max_prompt_tokens,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            has_chat_template=served.tokenizer.has_chat_template,
            default_sampling_params=defaults,
            drafters=[
                info_pb2.DrafterInfo(
                    method=method_value(drafter.method),
                    model_path=drafter.model_path,
                    max_draft_tokens=drafter.max_draft_tokens,
                )
                for drafter in model.drafters
            ],
        )

    async def GetServerInfo(
        self, request: info_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> info_pb2.GetServerInfoResponse:
        """Topology and state; asks the scheduler."""
        reply = await self._scheduler.query_server()
        settings = reply.speculation
        return info_pb2.GetServerInfoResponse(
            version=self._version,
            start_time=_timestamp(reply.start_time),
            state=_STATES["draining" if self._state.state == "draining" else reply.state],
            workers=[
                info_pb2.WorkerInfo(
                    rank=worker.rank,
                    device=worker.device,
                    pid=worker.pid,
                    # Infinite until the first beat, which no Duration can say.
                    heartbeat_age=duration(worker.heartbeat_age)
                    if math.isfinite(worker.heartbeat_age)
                    else None,
                )
                for worker in reply.workers
            ],
            page_size=reply.page_size,
            num_pages=reply.num_pages,
            max_running_requests=reply.max_running_requests,
            max_batched_tokens=reply.max_batched_tokens,
            speculation=None
            if settings is None
            else info_pb2.SpeculationSettings(
                method=method_value(settings.method),
                max_draft_tokens=settings.max_draft_tokens,
                disable_at_batch_size=settings.disable_at_batch_size,
            ),
        )

    async def GetLoad(
        self, request: info_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> info_pb2.GetLoadResponse:
        """Queue, pages and counters; asks the scheduler."""
        reply = await self._scheduler.query_load()
        return info_pb2.GetLoadResponse(
            time=_timestamp(reply.time),
            num_running_requests=reply.num_running_requests,
            num_waiting_requests=reply.num_waiting_requests,
            num_waiting_tokens=reply.num_waiting_tokens,
            num_used_pages=reply.num_used_pages,
            num_cached_pages=reply.num_cached_pages,
            num_generated_tokens=reply.num_generated_tokens,
            num_steps=reply.num_steps,
            num_preemptions=reply.num_preemptions,
            num_prompt_tokens=reply.num_prompt_tokens,
            num_cached_tokens=reply.num_cached_tokens,
            speculation=[speculation_stats(counters) for counters in reply.speculation],
        )


def _timestamp(seconds: float) -> timestamp_pb2.Timestamp:
    message = timestamp_pb2.Timestamp()
    message.FromMicroseconds(round(seconds * 1e6))
    return message
