"""The handshake with several ranks, and how a silent one is found out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from scheduler_svc.config import ServerConfig
from scheduler_svc.scheduler import worker_group
from scheduler_svc.scheduler.limits import resolve_limits
from scheduler_svc.scheduler.worker_group import WorkerGroup, WorkerLostError
from shared_mem import control
from shared_mem.heartbeat import HeartbeatWriter
from tests.scheduler.fake_worker import make_hello
from tests.scheduler.harness import make_limits

LIMITS = make_limits()


class Ranks:
    """A group and control sockets of its ranks."""

    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self._address = f"ipc://{directory}/control.sock"
        config = ServerConfig(page_size=LIMITS.page_size)
        self.group = WorkerGroup(config, self._address, f"test-{directory.name}", self.context)
        self._sockets: list[zmq.Socket[bytes]] = []

    def connect(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(self._address)
        self._sockets.append(socket)
        return socket

    def say(self, socket: zmq.Socket[bytes], message: control.WorkerMessage) -> None:
        socket.send(control.encode(message))
        assert self.group.control_socket.poll(5000)
        self.group.receive_control()

    def hear(self, socket: zmq.Socket[bytes]) -> Any:
        assert socket.poll(5000)
        return control.decode_scheduler_message(socket.recv())

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self.group.control_socket.linger = 0
        self.group.close()
        self.context.term()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.close()


def test_two_ranks_are_welcomed_together_and_the_smaller_pool_counts(ranks: Ranks) -> None:
    first, second = ranks.connect(), ranks.connect()
    ranks.say(second, make_hello(LIMITS, rank=1, world_size=2, num_pages=50, num_slots=6))
    assert not second.poll(50)
    ranks.say(first, make_hello(LIMITS, rank=0, world_size=2))
    welcome = ranks.hear(first)
    assert isinstance(welcome, control.Welcome)
    assert ranks.hear(second) == welcome
    assert not ranks.group.is_ready
    ranks.say(first, control.WorkerAttached(0))
    assert not ranks.group.is_ready
    ranks.say(second, control.WorkerAttached(1))
    assert ranks.group.is_ready
    limits = resolve_limits(ServerConfig(page_size=4, max_context_tokens=48), ranks.group.hellos)
    assert (limits.num_pages, limits.max_running_requests, limits.max_context_tokens) == (50, 6, 48)
    assert [worker.rank for worker in ranks.group.workers()] == [0, 1]


def test_a_small_pool_limits_the_context() -> None:
    limits = resolve_limits(ServerConfig(page_size=4), [make_hello(LIMITS, num_pages=10)])
    assert limits.max_context_tokens == 40


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layout_version": 99}, "layout version 99"),
        ({"page_size": 16}, "page_size 16, this scheduler has 4"),
        ({"rank": 2, "world_size": 2}, "rank 2 of a world of 2"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(ranks: Ranks, changes: dict[str, Any], problem: str) -> None:
    socket = ranks.connect()
    ranks.say(socket, make_hello(LIMITS, **changes))
    answer = ranks.hear(socket)
    assert isinstance(answer, control.Refused)
    assert problem in answer.message


def test_ranks_must_agree_on_the_world_and_come_once_it_is_not_complete(ranks: Ranks) -> None:
    first, second, late = ranks.connect(), ranks.connect(), ranks.connect()
    ranks.say(first, make_hello(LIMITS, rank=0, world_size=2))
    ranks.say(second, make_hello(LIMITS, rank=1, world_size=3))
    assert "world size 3, rank 0 has 2" in ranks.hear(second).message
    ranks.say(second, make_hello(LIMITS, rank=1, world_size=2))
    assert isinstance(ranks.hear(second), control.Welcome)
    ranks.say(late, make_hello(LIMITS, rank=1, world_size=2))
    assert ranks.hear(late).message == "the group is complete"


def test_a_rank_that_gives_up_is_a_lost_worker(ranks: Ranks) -> None:
    socket = ranks.connect()
    ranks.say(socket, make_hello(LIMITS))
    with pytest.raises(WorkerLostError, match="worker 0: no memory"):
        ranks.say(socket, control.WorkerFailed(0, "no memory"))


def test_strangers_speak_for_no_rank(ranks: Ranks) -> None:
    """A worker that outlived its scheduler connects to the next one; one too many is refused and gives up."""
    orphan, socket = ranks.connect(), ranks.connect()
    ranks.say(orphan, control.WorkerFailed(0, "an old step"))
    ranks.say(socket, make_hello(LIMITS))
    ranks.say(orphan, control.WorkerAttached(0))
    assert not ranks.group.is_ready
    ranks.say(socket, control.WorkerAttached(0))
    ranks.say(orphan, control.WorkerFailed(0, "an old step"))
    assert ranks.group.is_ready


def test_a_closed_connection_is_a_lost_worker_whoever_else_is_connected(ranks: Ranks) -> None:
    orphan, socket = ranks.connect(), ranks.connect()
    ranks.say(orphan, control.WorkerAttached(0))
    ranks.say(socket, make_hello(LIMITS))
    ranks.say(socket, control.WorkerAttached(0))
    ranks.group.check_connections()
    socket.close()
    assert ranks.group.connection_socket.poll(5000)
    with pytest.raises(WorkerLostError, match="worker 0: its process has ended"):
        ranks.group.check_connections()


def test_a_rank_that_ends_before_the_group_is_complete_is_awaited_again(ranks: Ranks) -> None:
    first, second, again = ranks.connect(), ranks.connect(), ranks.connect()
    ranks.say(first, make_hello(LIMITS, rank=0, world_size=2))
    ranks.group.check_connections()
    first.close()
    assert ranks.group.connection_socket.poll(5000)
    ranks.group.check_connections()
    ranks.say(second, make_hello(LIMITS, rank=1, world_size=2))
    assert not second.poll(50)
    ranks.say(again, make_hello(LIMITS, rank=0, world_size=2))
    assert isinstance(ranks.hear(again), control.Welcome)
    ranks.group.check_connections()


def test_silence_is_noticed_on_the_second_look(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    socket = ranks.connect()
    ranks.say(socket, make_hello(LIMITS))
    welcome = ranks.hear(socket)
    heartbeat = HeartbeatWriter.attach(welcome.heartbeat, 0)
    ranks.say(socket, control.WorkerAttached(0))
    ranks.group.check_heartbeats()
    heartbeat.close()
    clock = {"now": 100.0}
    monkeypatch.setattr(worker_group.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(ranks.group._heartbeat, "ages", lambda: [6.0])
    ranks.group.check_heartbeats()
    clock["now"] += 0.5
    ranks.group.check_heartbeats()  # it may only just have been woken together with us
    clock["now"] += 0.6
    with pytest.raises(WorkerLostError, match=r"worker 0: no heartbeat for 6\.0 s"):
        ranks.group.check_heartbeats()
