"""The other processes of these tests: `python -m tests.shared_mem.peer ROLE ARGUMENTS`, spawned, not forked.

Each prints one word when it is ready, and its findings as its last line; stderr is for faults only.
"""

from __future__ import annotations

import os
import random
import sys
import time

import zmq

from shared_mem.channel import ChannelReader
from shared_mem.doorbell import doorbell_address
from shared_mem.heartbeat import HeartbeatWriter
from shared_mem.segment import Segment

RING_CAPACITY = 16_384
OVERSIZE = 3 * RING_CAPACITY
_NOISE = random.Random(5).randbytes(OVERSIZE + 8_192)


def message(number: int) -> bytes:
    """The message of that number: mostly some 100 bytes, at times more than a quarter or all of the ring."""
    if number % 10_000 == 9_999:
        length = OVERSIZE
    elif number % 1_000 == 999:
        length = 5_000 + number % 777
    else:
        length = number * 7_919 % 211
    start = number * 31 % 8_192
    return number.to_bytes(8, "little") + _NOISE[start : start + length]


def read(name: str, index: str, count: str, pace: str) -> None:
    """Receive messages 0 .. count - 1 as reader `index`, at that pace; prints how many were right."""
    address = doorbell_address(name)
    with zmq.Context() as context, ChannelReader.attach(name, int(index), address, context) as reader:
        print("ready", flush=True)
        number = 0
        while number < int(count):
            received = reader.receive(60.0)
            if received != message(number):
                raise SystemExit(f"reader {index}: message {number} is wrong: {received and received[:40]!r}")
            number += 1
            if pace == "slow" and number % 2_000 == 0:
                time.sleep(0.02)
        extra = reader.receive(0.2)
    print(number if extra is None else f"one too many: {extra[:40]!r}")


def idle(name: str, index: str, seconds: str) -> None:
    """Wait for a message that never comes; prints the CPU seconds that the waiting took."""
    address = doorbell_address(name)
    with zmq.Context() as context, ChannelReader.attach(name, int(index), address, context) as reader:
        reader.receive(0.1)
        print("ready", flush=True)
        start = time.process_time()
        reader.receive(float(seconds))
        print(time.process_time() - start)


def create(name: str, directory: str) -> None:
    """Create a segment and keep it until killed."""
    segment = Segment.create(name, 4096, directory)
    print("ready", flush=True)
    sys.stdin.read()
    segment.close()


def attach(name: str, directory: str) -> None:
    """Attach, write a byte and exit without closing anything."""
    segment = Segment.attach(name, directory)
    segment.buffer[0] = 42
    print("ready", flush=True)


def beat(name: str, rank: str, epoch: str) -> None:
    """Beat as a rank until killed."""
    writer = HeartbeatWriter.attach(name, int(rank), int(epoch))
    writer.beat(7)
    print(f"ready {os.getpid()}", flush=True)
    sys.stdin.read()
    writer.close()


if __name__ == "__main__":
    {"read": read, "idle": idle, "create": create, "attach": attach, "beat": beat}[sys.argv[1]](*sys.argv[2:])
