"""How long a message takes from one process to another and back through two channels: prints microseconds.

    python -m tests.perf.ring_latency [--size BYTES] [--count N]

The other process is spawned, waits on its doorbell like a worker does, and sends every message back; a hop is
half of a round trip. Both processes sleep before a message comes, so a hop includes waking its receiver up.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import zmq

from shared_mem.channel import ChannelReader, ChannelWriter
from shared_mem.doorbell import doorbell_address
from shared_mem.segment import segment_name

CAPACITY = 1 << 20
TIMEOUT = 20.0


def echo(plan: str, result: str) -> None:
    """The worker's side: every message goes back until an empty one comes."""
    with (
        zmq.Context() as context,
        ChannelReader.attach(plan, 0, doorbell_address(plan), context) as plans,
        ChannelWriter.attach(result, doorbell_address(result), context) as results,
    ):
        while message := plans.receive(TIMEOUT):
            results.send(message, TIMEOUT)


def measure(size: int, count: int, pause: float) -> list[float]:
    """Seconds of `count` round trips with messages of `size` bytes, sorted."""
    instance = f"latency{os.getpid()}"
    plan, result = segment_name(instance, "plan"), segment_name(instance, "result")
    message = os.urandom(size)
    round_trips = []
    with (
        zmq.Context() as context,
        ChannelWriter.create(plan, CAPACITY, 1, doorbell_address(plan), context) as plans,
        ChannelReader.create(result, CAPACITY, doorbell_address(result), context) as results,
    ):
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        other = subprocess.Popen([sys.executable, __file__, "--echo", plan, result], env=environment)
        for i in range(count + 50):
            start = time.perf_counter()
            plans.send(message, TIMEOUT)
            if results.receive(TIMEOUT) is None:
                raise SystemExit(f"no answer within {TIMEOUT} s")
            if i >= 50:  # the first ones start processes and open connections
                round_trips.append(time.perf_counter() - start)
            time.sleep(pause)
        plans.send(b"", TIMEOUT)
        other.wait(TIMEOUT)
    return sorted(round_trips)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, action="append", help="bytes per message (repeatable)")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--echo", nargs=2, metavar=("PLAN", "RESULT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.echo:
        echo(*arguments.echo)
        return
    print(f"{'bytes':>8} {'hop p50 us':>11} {'hop p99 us':>11}")
    for size in arguments.size or [100, 1_000, 5_000, 20_000]:
        times = measure(size, arguments.count, pause=0.001)
        p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
        print(f"{size:>8} {p50 / 2 * 1e6:>11.0f} {p99 / 2 * 1e6:>11.0f}")


if __name__ == "__main__":
    main()
