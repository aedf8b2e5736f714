"""Whether the service takes requests, and with which model: as the scheduler and this process's end say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from scheduler_svc.errors import DraftlineError, ErrorReason
from scheduler_svc.frontend.tokenizer import ServedTokenizer
from scheduler_svc.messages import Model, ServiceStatus

HEALTH_SERVICES = ("", "draftline.v1.GenerationService", "draftline.v1.InfoService")

log = structlog.get_logger()


@dataclass(frozen=True)
class ServedModel:
    """What is served, complete: a request keeps the one it began with."""

    model: Model
    tokenizer: ServedTokenizer


class ServiceState:
    """Applies status messages in order; health, admission and readiness follow."""

    def __init__(
        self, health: health_aio.HealthServicer, on_failed: Callable[[DraftlineError], None]
    ) -> None:
        self._health = health
        self._on_failed = on_failed
        self._statuses: asyncio.Queue[ServiceStatus] = asyncio.Queue()
        self._state = "starting"
        self._detail = ""
        self._draining = False
        self._served: ServedModel | None = None
        self.serving = asyncio.Event()  # set once, when requests are first taken

    def on_status(self, status: ServiceStatus) -> None:
        """Takes the scheduler's word; `run` applies it."""
        self._statuses.put_nowait(status)

    async def run(self) -> None:
        """Applies statuses until cancelled. Raises StartupError when the model's tokenizer cannot be read."""
        await self._set_health()
        while True:
            await self._apply(await self._statuses.get())

    async def begin_drain(self) -> None:
        """From now on nothing is taken and health says NOT_SERVING, whatever the scheduler says."""
        self._draining = True
        await self._health.enter_graceful_shutdown()

    @property
    def state(self) -> str:
        """starting, serving, draining or failed."""
        return "draining" if self._draining else self._state

    def require_serving(self) -> ServedModel:
        """What new requests run on. Raises DraftlineError NOT_SERVING while none are taken."""
        if self.state != "serving" or self._served is None:
            detail = f": {self._detail}" if self._detail else ""
            raise DraftlineError(ErrorReason.NOT_SERVING, f"the service is {self.state}{detail}")
        return self._served

    def require_model(self) -> ServedModel:
        """What is or was served, for questions that need no worker. Raises as `require_serving` before."""
        if self._served is None:
            return self.require_serving()
        return self._served

    async def _apply(self, status: ServiceStatus) -> None:
        if status.state == "serving" and status.model is not None:
            path = status.model.tokenizer_path
            if self._served is None or self._served.model.tokenizer_path != path:
                # Megabytes to parse: calls and health checks go on meanwhile.
                tokenizer = await asyncio.to_thread(ServedTokenizer.load, Path(path))
            else:
                tokenizer = self._served.tokenizer
            self._served = ServedModel(status.model, tokenizer)
        if (status.state, status.detail) != (self._state, self._detail):
            log.info("service_state", state=status.state, detail=status.detail)
        self._state, self._detail = status.state, status.detail
        await self._set_health()
        if status.state == "serving":
            self.serving.set()
        elif status.state == "failed":
            self._on_failed(DraftlineError(ErrorReason.WORKER_LOST, f"the service failed: {status.detail}"))

    async def _set_health(self) -> None:
        serving = self.state == "serving"
        responses = health_pb2.HealthCheckResponse
        for service in HEALTH_SERVICES:
            await self._health.set(service, responses.SERVING if serving else responses.NOT_SERVING)
