"""The scheduler's process: one thread waits for frontends, workers, results and signals.

`python -m scheduler_svc.scheduler.process --config-json FILE --runtime-dir DIR`. It sleeps in one poll and
never spins. Plans are made one step ahead, so that workers never wait for one: while a step runs, the plan of the
next lies in their ring. After a result the next plan goes out before the tokens of the last one.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import structlog
import zmq

from scheduler_svc import logs
from scheduler_svc.config import ServerConfig, check
from scheduler_svc.errors import DraftlineError, ErrorReason, StartupError
from scheduler_svc.messages import (
    Abort,
    AbortReply,
    CacheFlushed,
    CallRefused,
    Cancel,
    FlushCache,
    FrontendHello,
    FrontendMessage,
    LoadQuery,
    LoadReply,
    Model,
    Rejected,
    SchedulerMessage,
    ServerReply,
    ServiceStatus,
    SetSpeculation,
    Submit,
)
from scheduler_svc.scheduler.event_pacer import EventPacer
from scheduler_svc.scheduler.events import Outbound
from scheduler_svc.scheduler.frontend_link import FrontendLink
from scheduler_svc.scheduler.limits import resolve_limits, served_model
from scheduler_svc.scheduler.scheduler import ResultError, Scheduler
from scheduler_svc.scheduler.worker_group import WorkerEndedError, WorkerGroup, WorkerLostError
from shared_mem.errors import SharedMemoryError
from shared_mem.segment import sweep_stale

_STEPS_IN_FLIGHT = 2  # the one that runs and the one behind it
_HEARTBEAT_CHECK_SECONDS = 0.5  # while a step is in flight
_RESEND_SECONDS = 0.02  # while a plan waits for space in the ring
_RETRY_AFTER_SECONDS = 1.0

log = structlog.get_logger()


class SchedulerProcess:
    """Owns the sockets and the clock; everything that needs thought is the Scheduler's."""

    def __init__(self, config: ServerConfig, runtime_dir: Path, signals: socket.socket) -> None:
        self._config = config
        self._signals = signals
        self._start_time = time.time()
        self._context: zmq.Context[Any] = zmq.Context()
        instance = f"{os.getpid()}-{secrets.token_hex(3)}"
        self._frontends = FrontendLink(f"ipc://{runtime_dir}/scheduler.sock", self._context)
        try:
            self._workers = WorkerGroup(config, f"ipc://{runtime_dir}/control.sock", instance, self._context)
        except StartupError:
            self._frontends.close()
            raise
        self._scheduler: Scheduler | None = None  # from the moment on when the workers are ready
        self._model: Model | None = None
        self._state = "starting"
        self._detail = ""
        self._outbox: list[Outbound] = []
        self._pacer = EventPacer(config.stream_interval_ms / 1000)
        self._next_heartbeat_check = 0.0  # monotonic
        self._drain_until: float | None = None  # monotonic
        self._num_sigterms = 0
        self._exit_code: int | None = None
        self._poller = zmq.Poller()
        for readable in (
            self._frontends.socket,
            self._workers.control_socket,
            self._workers.connection_socket,
            self._workers.result_socket,
            signals.fileno(),
        ):
            self._poller.register(readable, zmq.POLLIN)

    def run(self) -> int:
        """Serves until told to stop. Returns the exit code: 0 after a drain, 1 when the workers are lost.

        Raises StartupError when the workers are there but the service cannot begin.
        """
        log.info("scheduler_started", pid=os.getpid())
        try:
            while self._exit_code is None:
                ready = dict(self._poller.poll(self._milliseconds_to_wait()))
                try:
                    self._turn(ready)
                except (WorkerLostError, ResultError) as error:
                    if isinstance(error, WorkerEndedError) and self._drain_until is not None:
                        self._end_without_workers(str(error))
                    else:
                        self._fail(str(error))
                self._flush()
            return self._exit_code
        except StartupError as error:
            self._change_state("failed", str(error))
            self._workers.refuse_all(str(error))
            raise
        finally:
            self._workers.shut_down()
            self._workers.close()
            self._frontends.close()
            self._context.term()

    def _turn(self, ready: Mapping[Any, int]) -> None:
        """Everything that has happened since the last turn, as far as sockets are ready, then the next steps."""
        if self._signals.fileno() in ready:
            self._read_signals()
        if self._workers.control_socket in ready:
            self._workers.receive_control()
        if self._workers.connection_socket in ready:
            self._workers.check_connections()
        if self._scheduler is None and self._workers.is_ready:
            self._begin_to_serve()
        if self._frontends.socket in ready:
            for frontend, message in self._frontends.receive():
                self._outbox += self._answer(frontend, message)
        scheduler = self._scheduler
        if scheduler is not None:
            # Nothing ready: time has passed, and a doorbell may have got lost on its way.
            if not ready or self._workers.result_socket in ready:
                for result in self._workers.receive_results():
                    self._outbox += scheduler.apply(result)
            if scheduler.num_steps_in_flight and time.monotonic() >= self._next_heartbeat_check:
                self._workers.check_heartbeats()
                self._workers.check_steps()
                self._next_heartbeat_check = time.monotonic() + _HEARTBEAT_CHECK_SECONDS
            self._outbox += scheduler.expire(time.monotonic())
            now = time.time()
            self._workers.send_rest()
            while not self._workers.has_unsent and (plan := scheduler.schedule(now)) is not None:
                self._workers.send(plan)
        self._go_on_draining()

    def _milliseconds_to_wait(self) -> int | None:
        """Until the next thing that no socket announces; None: nothing of the kind."""
        waits = []
        if self._scheduler is not None:
            if self._scheduler.num_steps_in_flight:
                waits.append(self._next_heartbeat_check - time.monotonic())
            if self._scheduler.next_deadline is not None:
                waits.append(self._scheduler.next_deadline - time.monotonic())
        if self._workers.has_unsent:
            waits.append(_RESEND_SECONDS)
        if self._drain_until is not None:
            waits.append(self._drain_until - time.monotonic())
        if self._pacer.due is not None:
            waits.append(self._pacer.due - time.monotonic())
        # Rounded up: waking up a moment too early would mean to spin until it is over.
        return math.ceil(max(0.0, min(waits)) * 1000) if waits else None

    # --- frontends ---

    def _answer(self, frontend: bytes, message: FrontendMessage) -> list[Outbound]:
        scheduler = self._scheduler
        match message:
            case FrontendHello():
                return [Outbound(frontend, self._status())]
            case Submit():
                if scheduler is not None:
                    return scheduler.submit(frontend, _with_steady_deadline(message))
                text = "the model is still being loaded" if self._state == "starting" else "shutting down"
                return [
                    Outbound(
                        frontend,
                        Rejected(message.request_id, ErrorReason.NOT_SERVING, text, _RETRY_AFTER_SECONDS),
                    )
                ]
            case Cancel():
                if scheduler is not None:
                    scheduler.cancel(frontend, message)
                return []
            case Abort():
                if scheduler is not None:
                    return scheduler.abort(frontend, message)
                return [Outbound(frontend, AbortReply(message.call_id, ()))]
            case SetSpeculation() | FlushCache():
                return [Outbound(frontend, self._administer(message))]
            case LoadQuery():
                if scheduler is not None:
                    return [Outbound(frontend, scheduler.load(message.call_id, time.time()))]
                return [Outbound(frontend, _no_load(message.call_id))]
            case _:
                return [Outbound(frontend, self._server_reply(message.call_id))]

    def _administer(self, message: SetSpeculation | FlushCache) -> SchedulerMessage:
        scheduler = self._scheduler
        if scheduler is None:
            why = "the model is still being loaded"
            return CallRefused(message.call_id, ErrorReason.NOT_SERVING, why)
        if isinstance(message, FlushCache):
            num_freed_pages = scheduler.flush_prefix_cache()
            log.info("cache_flushed", num_freed_pages=num_freed_pages)
            return CacheFlushed(message.call_id, num_freed_pages)
        try:
            reply = scheduler.set_speculation(message)
        except DraftlineError as error:
            return CallRefused(message.call_id, error.reason, error.message, error.field)
        log.info(
            "speculation_changed",
            method=reply.method.label,
            max_draft_tokens=reply.max_draft_tokens,
            disable_at_batch_size=reply.disable_at_batch_size,
            effective_step=reply.effective_step,
        )
        return reply

    def _server_reply(self, call_id: int) -> ServerReply:
        limits = self._scheduler.limits if self._scheduler is not None else None
        return ServerReply(
            call_id=call_id,
            start_time=self._start_time,
            state=self._state,
            workers=self._workers.workers(),
            page_size=self._config.page_size,
            num_pages=limits.num_pages if limits else 0,
            max_running_requests=limits.max_running_requests if limits else 0,
            max_batched_tokens=self._config.max_batched_tokens,
            speculation=self._scheduler.speculation_in_force(call_id) if self._scheduler else None,
        )

    def _status(self) -> ServiceStatus:
        return ServiceStatus(self._state, self._model, self._detail)

    def _change_state(self, state: str, detail: str = "") -> None:
        self._state, self._detail = state, detail
        log.info("state_changed", state=state, detail=detail)
        self._forget(self._frontends.broadcast(self._status()))

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        self._forget(self._frontends.send(self._pacer.add(outbox, time.monotonic())))

    def _forget(self, gone: set[bytes]) -> None:
        """Nobody listens to a frontend's requests any more once it is gone."""
        for frontend in gone:
            # while draining frontends leave first: nothing is wrong then
            (log.warning if self._drain_until is None else log.info)("frontend_gone")
            if self._scheduler is not None:
                self._scheduler.forget_frontend(frontend)

    # --- workers ---

    def _begin_to_serve(self) -> None:
        hellos = self._workers.hellos
        limits = resolve_limits(self._config, hellos)
        self._model = served_model(self._config, limits, hellos[0].model)
        self._scheduler = Scheduler(limits, max_steps_in_flight=_STEPS_IN_FLIGHT)
        gc.freeze()  # what is here now stays: full collections need not walk over it
        if self._drain_until is not None:
            self._scheduler.accepting = False
            return
        self._change_state("serving")

    def _fail(self, why: str) -> None:
        log.error("workers_lost", error=why)
        if self._scheduler is not None:
            self._outbox += self._scheduler.reject_all(ErrorReason.WORKER_LOST, f"the worker is lost: {why}")
            self._scheduler.accepting = False
        self._flush()
        self._change_state("failed", why)
        self._exit_code = 1

    # --- the end ---

    def _end_without_workers(self, why: str) -> None:
        """A worker left during the drain: whoever ends the service is done waiting, as by a second SIGTERM."""
        if self._scheduler is not None:
            text = "the service shut down before the request was done"
            self._outbox += self._scheduler.reject_all(ErrorReason.NOT_SERVING, text)
        log.info("drain_cut_short", reason=why)
        self._exit_code = 0

    def _read_signals(self) -> None:
        try:
            received = self._signals.recv(64)
        except BlockingIOError:
            return
        self._num_sigterms += received.count(signal.SIGTERM)
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._config.drain_grace_seconds
            if self._scheduler is not None:
                self._scheduler.accepting = False
            self._change_state("draining")
        if self._num_sigterms > 1:
            self._drain_until = time.monotonic()

    def _go_on_draining(self) -> None:
        """Ends the process once the last request has ended; after the grace that is now."""
        if self._drain_until is None:
            return
        if self._scheduler is not None:
            if time.monotonic() >= self._drain_until:
                self._outbox += self._scheduler.abort_all()
            if self._scheduler.num_live_requests:
                return
        log.info("scheduler_drained")
        self._exit_code = 0


def _with_steady_deadline(submit: Submit) -> Submit:
    """The request with its deadline on the monotonic clock: a jump of the wall clock must not end it, nor spare it."""
    if submit.deadline is None:
        return submit
    return msgspec.structs.replace(submit, deadline=submit.deadline - time.time() + time.monotonic())


def _no_load(call_id: int) -> LoadReply:
    return LoadReply(call_id, time.time(), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ())


def _read_config(path: Path) -> ServerConfig:
    try:
        return check(msgspec.json.decode(path.read_bytes(), type=ServerConfig))
    except OSError as error:
        raise StartupError(f"--config-json {path}: {error.strerror}") from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise StartupError(f"--config-json {path}: {error}") from error


def _lock_directory(path: Path) -> int:
    """Keeps a second scheduler from taking a living one's sockets. The lock goes with the process."""
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StartupError(f"--runtime-dir {path}: another scheduler runs here") from error
    except OSError as error:
        raise StartupError(f"--runtime-dir {path}: {error.strerror}") from error
    return directory


def _catch_signals() -> socket.socket:
    """SIGTERM and SIGINT as bytes on a socket, which a poll can wait for."""

    def only_wake_up(signum: int, frame: FrameType | None) -> None:
        pass

    receiving, sending = socket.socketpair()
    receiving.setblocking(False)
    sending.setblocking(False)
    signal.set_wakeup_fd(sending.detach())
    # Ctrl-C reaches the whole process group: it begins a drain, but only a second SIGTERM cuts it short.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, only_wake_up)
    return receiving


def main(arguments: list[str] | None = None) -> int:
    """Runs the scheduler; returns the exit code. 2: cannot start, a line on stderr says why."""
    parser = argparse.ArgumentParser(prog="draftline-scheduler", description="Plans steps for the workers.")
    parser.add_argument("--config-json", type=Path, required=True, help="the service's settings")
    parser.add_argument("--runtime-dir", type=Path, required=True, help="where the sockets live")
    options = parser.parse_args(arguments)
    try:
        config = _read_config(options.config_json)
        logs.configure("scheduler", config.log_level)
        _lock_directory(options.runtime_dir)
        signals = _catch_signals()
        sweep_stale()
        return SchedulerProcess(config, options.runtime_dir, signals).run()
    except (StartupError, SharedMemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
