"""draftline.v1.AdminService: changes the running service; served on an address of its own."""

from __future__ import annotations

import grpc.aio
from draftline.v1 import admin_pb2

from scheduler_svc.errors import InvalidFieldError
from scheduler_svc.frontend.responses import method_value
from scheduler_svc.frontend.scheduler_client import SchedulerClient
from shared_mem.enums import SpeculationMethod


class AdminServicer:
    """Handlers; the scheduler decides what can be done."""

    def __init__(self, scheduler: SchedulerClient) -> None:
        self._scheduler = scheduler

    async def SetSpeculation(
        self, request: admin_pb2.SetSpeculationRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.SetSpeculationResponse:
        """Changes what is set; answers with what is in force then."""
        method = None
        if request.HasField("method"):
            try:
                method = SpeculationMethod(request.method)
            except ValueError as error:
                raise InvalidFieldError("method", f"{request.method} is no SpeculationMethod") from error
        settings = await self._scheduler.set_speculation(
            method,
            request.max_draft_tokens if request.HasField("max_draft_tokens") else None,
            request.disable_at_batch_size if request.HasField("disable_at_batch_size") else None,
        )
        return admin_pb2.SetSpeculationResponse(
            method=method_value(settings.method),
            max_draft_tokens=settings.max_draft_tokens,
            disable_at_batch_size=settings.disable_at_batch_size,
            effective_step=settings.effective_step,
        )

    async def FlushCache(
        self, request: admin_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.FlushCacheResponse:
        """Frees every cached page that no live request holds."""
        reply = await self._scheduler.flush_cache()
        return admin_pb2.FlushCacheResponse(num_freed_pages=reply.num_freed_pages)
