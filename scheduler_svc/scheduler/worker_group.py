"""The scheduler's side of all ranks: handshake, plans out, results back, heartbeats.

Each rank says WorkerHello once it has loaded. When all are there, the rings are made and every rank gets
Welcome; when all have answered WorkerAttached, the group is ready.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from scheduler_svc.config import ServerConfig
from scheduler_svc.errors import StartupError
from scheduler_svc.messages import Worker
from scheduler_svc.scheduler.step_watch import StepWatch
from shared_mem import control
from shared_mem.channel import ChannelReader, ChannelWriter
from shared_mem.doorbell import doorbell_address
from shared_mem.errors import ChannelTimeout, SharedMemoryError
from shared_mem.heartbeat import HeartbeatReader
from shared_mem.records import LAYOUT_VERSION, LayoutError, StepPlan, StepResult, decode_result, encode_plan
from shared_mem.segment import segment_name

_RING_BYTES = 4 << 20  # more than most plans need; a longer one goes in piece by piece
_SEND_SECONDS = 0.02  # what a plan may hold up the loop at a time
_HEARTBEAT_SECONDS = 5.0  # a rank that is silent for longer is lost
_RECHECK_SECONDS = 1.0  # ... unless it only just woke up together with us (both were stopped, or starved)

log = structlog.get_logger()


class WorkerLostError(Exception):
    """A rank died, hangs or breaks the protocol; the group has to be started again."""


class WorkerEndedError(WorkerLostError):
    """A rank's process ended: killed, crashed, or told to stop."""


@dataclass(slots=True)
class _Rank:
    identity: bytes
    connection: int  # the file descriptor that its messages come from
    hello: control.WorkerHello
    attached: bool = False


class WorkerGroup:
    """All ranks of one model. Use from one thread."""

    def __init__(self, config: ServerConfig, address: str, instance: str, context: zmq.Context[Any]) -> None:
        self._config = config
        self._instance = instance
        self._context = context
        self._ranks: dict[int, _Rank] = {}
        self._plans: ChannelWriter | None = None
        self._unsent: bytes | None = None  # a plan that the ring has not taken all of
        self._heartbeat: HeartbeatReader | None = None
        self._silent_since: float | None = None
        self._steps = StepWatch(config.step_timeout_seconds)
        name = segment_name(instance, "results")
        try:
            self._results = ChannelReader.create(name, _RING_BYTES, doorbell_address(name), context)
        except SharedMemoryError as error:
            raise StartupError(str(error)) from error
        self.control_socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.control_socket.setsockopt(zmq.LINGER, 1000)
        # The kernel closes a dead process's connections: that is known at once, a missing heartbeat only later.
        self.connection_socket: zmq.Socket[bytes] = self.control_socket.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        )
        self._connections: set[int] = set()  # file descriptors, those of strangers among them
        try:
            self.control_socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise StartupError(f"control socket {address}: {error}") from error

    @property
    def result_socket(self) -> zmq.Socket[bytes]:
        """Readable when results may have come."""
        return self._results.socket

    @property
    def is_ready(self) -> bool:
        """Whether every rank has attached and plans may go out."""
        return self._plans is not None and all(rank.attached for rank in self._ranks.values())

    @property
    def hellos(self) -> list[control.WorkerHello]:
        """What the ranks said of themselves, leader first."""
        return [self._ranks[rank].hello for rank in sorted(self._ranks)]

    def workers(self) -> tuple[Worker, ...]:
        """The ranks for ServerReply."""
        ages = self._heartbeat.ages() if self._heartbeat is not None else []
        return tuple(
            Worker(hello.rank, hello.device, hello.pid, ages[hello.rank] if ages else 0.0)
            for hello in self.hellos
        )

    def receive_control(self) -> None:
        """Handles all control messages that have come.

        Raises WorkerLostError when a rank gives up, StartupError when the rings cannot be made.
        """
        while self.control_socket.poll(0):
            sender, frame = self.control_socket.recv_multipart(copy=False)[:2]
            identity = sender.bytes
            try:
                message = control.decode_worker_message(frame.bytes)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                log.error("bad_worker_message", error=str(error))
                continue
            if isinstance(message, control.WorkerHello):
                self._greet(identity, int(frame.get(zmq.SRCFD)), message)
                continue
            rank = self._ranks.get(message.rank)
            if rank is None or rank.identity != identity:
                # refused, or another scheduler's, which it outlived: not one of ours
                log.warning("stray_worker_message", rank=message.rank, message=type(message).__name__)
            elif isinstance(message, control.WorkerFailed):
                raise WorkerLostError(f"worker {message.rank}: {message.message}")
            else:
                rank.attached = True

    def check_connections(self) -> None:
        """Raises WorkerEndedError when the connection of a rank that was welcomed is closed."""
        while self.connection_socket.poll(0):
            event = recv_monitor_message(self.connection_socket)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connections.add(event["value"])
            else:
                self._connections.discard(event["value"])
        for number, rank in list(self._ranks.items()):
            if rank.connection in self._connections:
                continue
            if self._plans is not None:
                raise WorkerEndedError(f"worker {number}: its process has ended")
            del self._ranks[number]  # another one may come in its place

    def send(self, plan: StepPlan) -> None:
        """Hands a plan to every rank, as far as there is space: see has_unsent. Raises WorkerLostError."""
        assert not self.has_unsent, "one plan at a time"
        self._steps.sent(plan.step_id, time.monotonic())
        self._unsent = encode_plan(plan)
        self.send_rest()

    @property
    def has_unsent(self) -> bool:
        """Whether a part of the last plan waits for space: until ranks have done the step before it, if it is large.

        Then call send_rest until it is gone. How long that may take is check_steps' to say.
        """
        return self._unsent is not None

    def send_rest(self) -> None:
        """Goes on with a plan that waits for space, if one does. Raises WorkerLostError when the ring is broken."""
        if self._unsent is None:
            return
        assert self._plans is not None, "plans go out when the group is ready"
        try:
            self._plans.send(self._unsent, _SEND_SECONDS)
        except ChannelTimeout:
            return  # the very same object goes on where this ended
        except SharedMemoryError as error:
            raise WorkerLostError(str(error)) from error
        self._unsent = None

    def receive_results(self) -> list[StepResult]:
        """All results that have come. Raises WorkerLostError for bytes that are none."""
        try:
            results = [decode_result(data) for data in self._results.drain()]
        except (SharedMemoryError, LayoutError) as error:
            raise WorkerLostError(str(error)) from error
        for result in results:
            self._steps.got_result(result.step_id, time.monotonic())
        return results

    def check_heartbeats(self) -> None:
        """Raises WorkerLostError when a rank has been silent for too long, twice in a row."""
        if self._heartbeat is None:
            return
        ages = self._heartbeat.ages()
        rank = max(range(len(ages)), key=ages.__getitem__)
        now = time.monotonic()
        if ages[rank] <= _HEARTBEAT_SECONDS:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= _RECHECK_SECONDS:
            silence = "ever" if math.isinf(ages[rank]) else f"for {ages[rank]:.1f} s"
            raise WorkerLostError(f"worker {rank}: no heartbeat {silence}")

    def check_steps(self) -> None:
        """Raises WorkerLostError when the oldest step has had no result for too long: its heartbeat alone goes on."""
        overdue = self._steps.overdue(time.monotonic())
        if overdue is not None:
            raise WorkerLostError(
                f"worker 0: step {overdue.step_id} has no result after {overdue.seconds:.1f} s "
                f"(step_timeout_seconds: {self._config.step_timeout_seconds:g})"
            )

    def shut_down(self) -> None:
        """Tells every rank to finish its step and exit."""
        for rank in self._ranks.values():
            self._answer(rank.identity, control.Shutdown())

    def close(self) -> None:
        """Removes rings and sockets; ranks that still have them mapped are not disturbed."""
        self._results.close()
        if self._plans is not None:
            self._plans.close()
        if self._heartbeat is not None:
            self._heartbeat.close()
        self.control_socket.disable_monitor()
        self.connection_socket.close(linger=0)
        self.control_socket.close()

    def _greet(self, identity: bytes, connection: int, hello: control.WorkerHello) -> None:
        problem = self._misfit(hello)
        if problem:
            log.error("worker_refused", rank=hello.rank, problem=problem)
            self._answer(identity, control.Refused(problem))
            return
        self._ranks[hello.rank] = _Rank(identity, connection, hello)
        log.info("worker_loaded", rank=hello.rank, world_size=hello.world_size, num_pages=hello.num_pages)
        if len(self._ranks) == hello.world_size:
            self._welcome(hello.world_size)

    def _misfit(self, hello: control.WorkerHello) -> str:
        if hello.layout_version != LAYOUT_VERSION:
            return f"layout version {hello.layout_version}, this scheduler speaks {LAYOUT_VERSION}"
        if hello.page_size != self._config.page_size:
            return f"page_size {hello.page_size}, this scheduler has {self._config.page_size}"
        if not 0 <= hello.rank < hello.world_size:
            return f"rank {hello.rank} of a world of {hello.world_size}"
        if self._plans is not None:
            return "the group is complete"
        for other in self._ranks.values():
            if other.hello.world_size != hello.world_size:
                return f"world size {hello.world_size}, rank {other.hello.rank} has {other.hello.world_size}"
        return ""

    def _welcome(self, world_size: int) -> None:
        plan_ring = segment_name(self._instance, "plans")
        try:
            self._plans = ChannelWriter.create(
                plan_ring, _RING_BYTES, world_size, doorbell_address(plan_ring), self._context
            )
            self._heartbeat = HeartbeatReader.create(segment_name(self._instance, "heartbeat"), world_size)
        except SharedMemoryError as error:
            raise StartupError(str(error)) from error
        welcome = control.Welcome(
            plan_ring=plan_ring,
            result_ring=self._results.name,
            heartbeat=self._heartbeat.name,
            plan_doorbell=doorbell_address(plan_ring),
            result_doorbell=doorbell_address(self._results.name),
        )
        for rank in self._ranks.values():
            self._answer(rank.identity, welcome)

    def refuse_all(self, message: str) -> None:
        """Sends every waiting rank away: the scheduler cannot start."""
        for rank in self._ranks.values():
            self._answer(rank.identity, control.Refused(message))

    def _answer(self, identity: bytes, message: control.SchedulerMessage) -> None:
        self.control_socket.send_multipart([identity, control.encode(message)])
