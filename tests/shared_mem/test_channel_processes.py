"""A channel between processes: 1 writer, 3 readers, nothing lost, doubled or torn, and nobody spins."""

from __future__ import annotations

import time

import pytest
import zmq

from shared_mem.channel import ChannelWriter
from shared_mem.doorbell import doorbell_address
from shared_mem.errors import ChannelTimeout
from shared_mem.segment import sweep_stale
from tests.shared_mem.conftest import Spawn
from tests.shared_mem.peer import OVERSIZE, RING_CAPACITY, message

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.mark.parametrize(
    "count", [100_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_three_readers_get_every_message_once_and_whole(
    count: int, name: str, context: Context, spawn: Spawn
) -> None:
    """Thousands of laps, messages of three times the ring, one reader that naps and holds the writer up."""
    assert len(message(9_999)) > OVERSIZE > 2 * RING_CAPACITY
    with ChannelWriter.create(name, RING_CAPACITY, 3, doorbell_address(name), context) as writer:
        readers = [spawn("read", name, i, count, "slow" if i == 2 else "quick") for i in range(3)]
        for number in range(count):
            writer.send(message(number), 30.0)
        for reader in readers:
            out, err = reader.communicate(timeout=60)
            assert (out, err, reader.returncode) == (f"{count}\n", "", 0)


def test_waiting_costs_no_cpu(name: str, context: Context, spawn: Spawn) -> None:
    """A reader without messages and a writer without space each use less than 2% of a core."""
    with ChannelWriter.create(name, RING_CAPACITY, 2, doorbell_address(name), context) as writer:
        reader = spawn("idle", name, 0, 2.0)
        out, err = reader.communicate(timeout=30)
        assert err == ""
        assert float(out) < 0.02 * 2.0
        while True:
            try:
                writer.send(bytes(1000), 0)
            except ChannelTimeout:
                break
        start = time.process_time()
        with pytest.raises(ChannelTimeout, match=r"reader 1 \(never attached\)"):
            writer.send(bytes(1000), 1.5)
        assert time.process_time() - start < 0.02 * 1.5


def test_a_killed_reader_is_named_and_leaves_nothing(name: str, context: Context, spawn: Spawn) -> None:
    with ChannelWriter.create(name, RING_CAPACITY, 2, doorbell_address(name), context) as writer:
        killed, living = spawn("idle", name, 0, 60), spawn("read", name, 1, 6, "quick")
        killed.kill()
        killed.wait()
        for number in range(4):
            writer.send(message(number), 10)
        with pytest.raises(ChannelTimeout, match=rf"reader 0 \(pid {killed.pid}\) has") as caught:
            writer.send(bytes(OVERSIZE), 0.3)
        assert caught.value.readers == (0,)
        # The file of its doorbell has a living segment, whose writer will remove it.
        assert not [swept for swept in sweep_stale() if swept.startswith(name)]
        living.kill()
