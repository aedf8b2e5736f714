"""The gRPC server of a frontend: binds, serves, drains. One object holds all parts of the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import structlog
from draftline.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    info_pb2,
    info_pb2_grpc,
)
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from scheduler_svc.config import ServerConfig
from scheduler_svc.errors import StartupError
from scheduler_svc.frontend.admin_servicer import AdminServicer
from scheduler_svc.frontend.generation_servicer import GenerationServicer
from scheduler_svc.frontend.info_servicer import InfoServicer
from scheduler_svc.frontend.interceptors import CallInterceptor
from scheduler_svc.frontend.scheduler_client import SchedulerClient
from scheduler_svc.frontend.service_state import ServiceState
from scheduler_svc.listen import ListenAddress
from scheduler_svc.messages import LoadReply
from scheduler_svc.metrics import FrontendMetrics

_MAX_MESSAGE_BYTES = 32 * 1024 * 1024
_STOP_GRACE_SECONDS = 0.5  # after the drain: for last statuses to go out and health watchers to be cut

OPTIONS = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server on it
    # Clients ping through long silences (every 10 s is usual), also without calls: never a GOAWAY for that.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Our own pings find callers whose machine vanished, so that their requests end.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

log = structlog.get_logger()


def scheduler_address(runtime_dir: Path) -> str:
    """Where the scheduler's ROUTER for frontends is bound."""
    return f"ipc://{runtime_dir}/scheduler.sock"


class FrontendServer:
    """Life of a frontend: `start`, then `wait_serving` or `wait_failed`, at the end `drain_and_stop`."""

    def __init__(self, config: ServerConfig, runtime_dir: Path) -> None:
        self._config = config
        self._address = ListenAddress.parse(config.listen)
        self._metrics_address = None
        if config.metrics_listen:
            self._metrics_address = ListenAddress.parse_tcp(config.metrics_listen, "metrics_listen")
        self.metrics = FrontendMetrics()
        health_servicer = health.aio.HealthServicer()
        self._scheduler = SchedulerClient(
            scheduler_address(runtime_dir), lambda status: self._state.on_status(status)
        )
        self._state = ServiceState(health_servicer, self._scheduler.reject_all)
        self._generation = GenerationServicer(self._state, self._scheduler, self.metrics)
        self._server = grpc.aio.server(options=OPTIONS, interceptors=[CallInterceptor(self.metrics)])
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._generation, self._server)
        info_pb2_grpc.add_InfoServiceServicer_to_server(
            InfoServicer(self._state, self._scheduler), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, self._server)
        names = (
            generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
            info_pb2.DESCRIPTOR.services_by_name["InfoService"].full_name,
            health.SERVICE_NAME,
            reflection.SERVICE_NAME,
        )
        reflection.enable_server_reflection(names, self._server)
        self._admin_address = None
        self._admin: grpc.aio.Server | None = None
        if config.admin_listen:
            self._admin_address = ListenAddress.parse(config.admin_listen, "admin_listen")
            self._admin = self._admin_server()
        self._state_task: asyncio.Task[None] | None = None
        self._stop_metrics: Callable[[], None] | None = None
        self.listen = ""  # the bound address, after `start`
        self.admin_listen = ""  # the same of the admin service, if there is one

    def _admin_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=OPTIONS, interceptors=[CallInterceptor(self.metrics)])
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self._scheduler), server)
        name = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
        reflection.enable_server_reflection((name, reflection.SERVICE_NAME), server)
        return server

    async def start(self) -> None:
        """Binds and answers; health is NOT_SERVING until the scheduler serves. Raises StartupError."""
        self.listen = _bind(self._server, self._address)
        if self._admin is not None and self._admin_address is not None:
            self.admin_listen = _bind(self._admin, self._admin_address)
            if self._admin_address.path:
                os.chmod(self._admin_address.path, 0o600)  # what changes the service is its owner's alone
        if self._metrics_address is not None:
            loop = asyncio.get_running_loop()
            self._stop_metrics = self.metrics.serve(
                self._metrics_address, lambda: self._load_for_scrape(loop)
            )
        self._state_task = asyncio.create_task(self._state.run())
        self._scheduler.start()
        await self._server.start()
        if self._admin is not None:
            await self._admin.start()
        log.info("listening", listen=self.listen, admin_listen=self.admin_listen)

    async def wait_serving(self) -> str:
        """Returns the model's name once requests are taken. Raises what broke before, e.g. StartupError."""
        serving = asyncio.create_task(self._state.serving.wait())
        try:
            assert self._state_task is not None, "start() comes first"
            await asyncio.wait({serving, self._state_task}, return_when=asyncio.FIRST_COMPLETED)
            if self._state_task.done():
                self._state_task.result()
        finally:
            serving.cancel()
        return self._state.require_model().model.name

    async def wait_failed(self) -> None:
        """Never returns; raises what ends the process, e.g. StartupError when a new model cannot be read."""
        assert self._state_task is not None, "start() comes first"
        await self._state_task

    async def drain_and_stop(self) -> None:
        """Takes nothing new, lets live streams finish within the grace, ends the rest, closes everything."""
        await self._state.begin_drain()
        await self._generation.drain(self._config.drain_grace_seconds)
        await self.stop(_STOP_GRACE_SECONDS)

    async def stop(self, grace_seconds: float | None = None) -> None:
        """Closes everything; calls still open after the grace are cut. May be called again."""
        if self._admin is not None:
            await self._admin.stop(grace_seconds)
        await self._server.stop(grace_seconds)
        if self._state_task is not None:
            self._state_task.cancel()
            with contextlib.suppress(asyncio.CancelledError, StartupError):
                await self._state_task
        await self._scheduler.close()
        if self._stop_metrics is not None:
            await asyncio.to_thread(self._stop_metrics)
            self._stop_metrics = None

    def _load_for_scrape(self, loop: asyncio.AbstractEventLoop) -> LoadReply | None:
        """In the metrics thread: the scheduler's load, or None when it does not answer."""
        try:
            return asyncio.run_coroutine_threadsafe(self._scheduler.query_load(), loop).result(timeout=2)
        except Exception as error:  # a scrape without gauges beats no scrape
            log.warning("load_not_scraped", error=str(error))
            return None


def _bind(server: grpc.aio.Server, address: ListenAddress) -> str:
    """Binds; returns the bound address. Raises StartupError when something else listens there."""
    address.check_free()
    try:
        port = server.add_insecure_port(address.text)
    except RuntimeError as error:
        raise StartupError(f"{address.field}: {address.text}: cannot be bound") from error
    return address.with_port(port)
