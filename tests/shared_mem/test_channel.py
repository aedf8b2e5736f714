"""Channels within one process: both directions, timeouts, doorbells that come early, late or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from shared_mem.channel import ChannelReader, ChannelWriter
from shared_mem.doorbell import ReaderDoorbell, WriterDoorbell, doorbell_address, reader_address
from shared_mem.errors import ChannelTimeout, RingError, SharedMemoryError
from shared_mem.segment import Segment

Context = zmq.Context[zmq.Socket[bytes]]

CAPACITY = 4096


@pytest.fixture(params=["ipc", "inproc", "tcp"])
def address(request: pytest.FixtureRequest, name: str, unused_tcp_port: int) -> Iterator[str]:
    return {
        "ipc": doorbell_address(name),
        "inproc": f"inproc://{name}",
        "tcp": f"tcp://127.0.0.1:{unused_tcp_port}",
    }[request.param]


def poll(reader: ChannelReader, seconds: float) -> bool:
    return bool(reader.socket.poll(int(seconds * 1000), zmq.POLLIN))


def test_messages_cross_over_every_transport(name: str, address: str, context: Context) -> None:
    with (
        ChannelWriter.create(name, CAPACITY, 1, address, context) as writer,
        ChannelReader.attach(name, 0, address, context) as reader,
    ):
        assert reader.receive(0) is None
        writer.send(b"one", 1)
        assert poll(reader, 5)
        assert reader.drain() == [b"one"]
        assert not poll(reader, 0.02)
        writer.send(b"", 1)
        writer.send(b"three", 1)
        assert poll(reader, 5)
        assert reader.receive(1) == b""
        assert reader.drain() == [b"three"]
        assert reader.drain() == []


def test_the_reader_may_create_and_the_writer_attach(name: str, context: Context) -> None:
    address = doorbell_address(name)
    with (
        ChannelReader.create(name, CAPACITY, address, context) as reader,
        ChannelWriter.attach(name, address, context) as writer,
    ):
        writer.send(b"result", 1)
        assert poll(reader, 5)
        assert reader.drain() == [b"result"]
        with pytest.raises(RingError, match="already writes"):
            ChannelWriter.attach(name, address, context)


def test_the_first_message_rings_a_reader_that_attaches_later_and_only_polls(
    name: str, context: Context
) -> None:
    address = doorbell_address(name)
    with ChannelWriter.create(name, CAPACITY, 1, address, context) as writer:
        writer.send(b"early", 1)
        time.sleep(0.05)  # the writer's connection fails and is tried again
        with ChannelReader.attach(name, 0, address, context) as reader:
            assert poll(reader, 5)
            assert reader.drain() == [b"early"]


def test_a_busy_reader_is_not_rung_for_every_message(name: str, context: Context) -> None:
    address = f"inproc://{name}"
    with (
        ChannelWriter.create(name, CAPACITY, 1, address, context) as writer,
        ChannelReader.attach(name, 0, address, context) as reader,
    ):
        for i in range(20):
            writer.send(bytes([i]), 1)
        rings = 0
        while poll(reader, 0.02):
            reader.socket.recv()
            rings += 1
        assert rings == 1
        assert reader.drain() == [bytes([i]) for i in range(20)]


def test_taking_messages_asks_for_no_doorbell(name: str, context: Context) -> None:
    with (
        ChannelWriter.create(name, CAPACITY, 1, doorbell_address(name), context) as writer,
        ChannelReader.attach(name, 0, doorbell_address(name), context) as reader,
    ):
        writer.send(b"rings: the reader was armed from the start", 1)
        assert poll(reader, 5)
        assert reader.drain() != []
        writer.send(b"rings: drain asked for it", 1)
        assert poll(reader, 5)
        assert reader.take() == b"rings: drain asked for it"
        assert reader.take() is None
        assert reader.drain() == []  # consumes that ring, and asks for the next
        writer.send(b"first", 1)
        assert poll(reader, 5)
        assert reader.take() == b"first"
        writer.send(b"second", 1)
        writer.send(b"third", 1)
        assert [reader.take(), reader.take(), reader.take()] == [b"second", b"third", None]
        assert reader.drain() == []
        assert not poll(reader, 0.05)  # nobody had rung for the second and the third


@pytest.mark.parametrize("how", ["receive", "drain"])
def test_a_lost_doorbell_loses_no_message(
    how: str, name: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"inproc://{name}"
    with (
        ChannelWriter.create(name, CAPACITY, 1, address, context) as writer,
        ChannelReader.attach(name, 0, address, context) as reader,
    ):
        reader.drain()
        monkeypatch.setattr(WriterDoorbell, "ring", lambda self, index: None)
        if how == "drain":
            writer.send(b"silent", 1)
            assert not poll(reader, 0.02)
            assert reader.drain() == [b"silent"]
            return
        timer = threading.Timer(0.02, writer.send, (b"silent", 1))
        timer.start()
        start = time.monotonic()
        assert reader.receive(10) == b"silent"
        assert time.monotonic() - start < 2
        timer.join()


def test_a_lost_space_report_only_delays_the_writer(
    name: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"inproc://{name}"
    monkeypatch.setattr(ReaderDoorbell, "ring", lambda self: None)
    with (
        ChannelWriter.create(name, CAPACITY, 1, address, context) as writer,
        ChannelReader.attach(name, 0, address, context) as reader,
    ):
        for _ in range(4):
            writer.send(bytes(CAPACITY // 4 - 32), 1)
        timer = threading.Timer(0.02, reader.drain)
        timer.start()
        writer.send(bytes(900), 10)
        timer.join()


def test_timeout_names_the_slow_readers_and_sends_nothing(name: str, context: Context) -> None:
    address = doorbell_address(name)
    with (
        ChannelWriter.create(name, CAPACITY, 3, address, context) as writer,
        ChannelReader.attach(name, 0, address, context) as quick,
        ChannelReader.attach(name, 1, address, context) as slow,
    ):
        sent = [bytes([i]) * 900 for i in range(4)]
        for data in sent:
            writer.send(data, 1)
        assert quick.drain() == sent
        start = time.monotonic()
        with pytest.raises(
            ChannelTimeout,
            match=rf"{name}: no space for a message of 800 bytes within 0\.25 s: "
            r"reader 1 \(pid \d+\) has 3840 of 4096 bytes unread; reader 2 \(never attached\) has 3840 of",
        ) as caught:
            writer.send(bytes(800), 0.25)
        assert 0.2 < time.monotonic() - start < 2
        assert caught.value.readers == (1, 2)
        assert quick.receive(0) is None
        assert slow.drain() == sent
        with ChannelReader.attach(name, 2, address, context) as late:
            assert late.drain() == sent
            writer.send(b"again", 1)
            assert [reader.receive(1) for reader in (quick, slow, late)] == [b"again"] * 3


def test_a_message_larger_than_the_ring_waits_for_its_readers(name: str, context: Context) -> None:
    address = doorbell_address(name)
    huge = bytes(range(256)) * 8000
    received: list[bytes | None] = []
    with (
        ChannelWriter.create(name, CAPACITY, 2, address, context) as writer,
        ChannelReader.attach(name, 0, address, context) as first,
        ChannelReader.attach(name, 1, address, context) as second,
    ):
        threads = [
            threading.Thread(target=lambda reader=reader: received.append(reader.receive(20)))
            for reader in (first, second)
        ]
        for thread in threads:
            thread.start()
        start = time.monotonic()
        writer.send(huge, 20)
        for thread in threads:
            thread.join()
        assert received == [huge, huge]
        # Some 2000 frames through a ring of four: waits that end by their timeout only would take 10 seconds.
        assert time.monotonic() - start < 5


def test_an_oversize_message_that_timed_out_is_not_seen_unless_sent_again(
    name: str, context: Context
) -> None:
    address = doorbell_address(name)
    huge = bytes(range(256)) * 20
    with (
        ChannelWriter.create(name, CAPACITY, 1, address, context) as writer,
        ChannelReader.attach(name, 0, address, context) as reader,
    ):
        with pytest.raises(ChannelTimeout):
            writer.send(huge, 0)
        assert reader.drain() == []
        writer.send(huge, 1)
        assert reader.drain() == [huge]
        with pytest.raises(ChannelTimeout):
            writer.send(huge, 0)
        assert reader.drain() == []
        writer.send(b"another", 1)
        assert reader.drain() == [b"another"]


def test_a_reader_that_closes_frees_a_waiting_writer(name: str, context: Context) -> None:
    address = doorbell_address(name)
    with ChannelWriter.create(name, CAPACITY, 1, address, context) as writer:
        reader = ChannelReader.attach(name, 0, address, context)
        for _ in range(4):
            writer.send(bytes(900), 1)
        timer = threading.Timer(0.05, reader.close)
        timer.start()
        writer.send(bytes(900), 10)
        timer.join()
        writer.send(bytes(9000), 0)


def test_receive_waits_no_longer_than_told(name: str, context: Context) -> None:
    with ChannelReader.create(name, CAPACITY, f"inproc://{name}", context) as reader:
        start = time.monotonic()
        assert reader.receive(0.15) is None
        assert 0.14 < time.monotonic() - start < 2


def test_closing_removes_segment_and_socket_files(name: str, tmp_path: Path, context: Context) -> None:
    address = doorbell_address(name, tmp_path)
    writer = ChannelWriter.create(name, CAPACITY, 2, address, context, tmp_path)
    reader = ChannelReader.attach(name, 0, address, context, tmp_path)
    killed = ChannelReader.attach(name, 1, address, context, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}.bell.0", f"{name}.bell.1"}
    reader.close()
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}.bell.1"}
    writer.close()  # what the other reader would have left, had it been killed, goes too
    assert not list(tmp_path.iterdir())
    for end in (reader, writer, killed):
        end.close()


def test_faults_leave_nothing_behind(name: str, tmp_path: Path, context: Context) -> None:
    address = doorbell_address(name, tmp_path)
    with pytest.raises(SharedMemoryError, match=r"doorbell cannot connect to nonsense\.0"):
        ChannelWriter.create(name, CAPACITY, 1, "nonsense", context, tmp_path)
    with pytest.raises(SharedMemoryError, match=r"doorbell cannot bind ipc://.*longer than 107 characters"):
        ChannelReader.create(name, CAPACITY, f"ipc://{tmp_path}/{'x' * 120}", context, tmp_path)
    with pytest.raises(SharedMemoryError, match="num_readers must be at least 1, not 0"):
        ChannelWriter.create(name, CAPACITY, 0, address, context, tmp_path)
    with pytest.raises(SharedMemoryError, match="No such file"):
        ChannelReader.attach(name, 0, address, context, tmp_path)
    with Segment.create(name, 4096, tmp_path), pytest.raises(RingError, match="no ring here"):
        ChannelReader.attach(name, 0, address, context, tmp_path)
    assert not list(tmp_path.iterdir())


def test_reader_address() -> None:
    assert reader_address("ipc:///run/d/plan.bell", 2) == "ipc:///run/d/plan.bell.2"
    assert reader_address("inproc://plan", 0) == "inproc://plan.0"
    assert reader_address("tcp://127.0.0.1:7000", 3) == "tcp://127.0.0.1:7003"
    with pytest.raises(SharedMemoryError, match="no port number"):
        reader_address("tcp://127.0.0.1:*", 0)
