"""Beside the channels: every worker shows that it runs, the scheduler sees how long ago it last did.

One segment, in 64-byte lines of little-endian 64-bit words. Line 0: magic, layout version, world size.
Line 1 + rank: pid, monotonic nanoseconds of the last beat, steps done, epoch. CLOCK_MONOTONIC is one clock
for all processes of a host. Every word is read and written by one aligned 8-byte access; a record as a
whole may mix two beats.
"""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from shared_mem.errors import SharedMemoryError
from shared_mem.ring_layout import fence
from shared_mem.segment import DEFAULT_DIRECTORY, Segment

HEARTBEAT_MAGIC = int.from_bytes(b"DRAFTHBT", "little")
HEARTBEAT_LAYOUT_VERSION = 1
BEAT_SECONDS = 0.5

_LINE_WORDS = 8
_LINE_BYTES = 64
_MAGIC, _VERSION, _WORLD_SIZE = range(3)
_PID, _BEAT_NS, _STEPS, _EPOCH = range(4)


@dataclass(frozen=True)
class Heartbeat:
    """What one rank last said of itself."""

    pid: int  # 0: it never beat
    age: float  # seconds since the last beat; inf: it never beat
    num_steps: int
    epoch: int  # of the worker group, as given to its HeartbeatWriter


class HeartbeatReader:
    """The scheduler's side: creates the segment and reads it."""

    def __init__(self, segment: Segment, world_size: int) -> None:
        self.name = segment.name
        self._segment = segment
        self._world_size = world_size
        self._words = segment.buffer.cast("Q")
        self._words[_VERSION] = HEARTBEAT_LAYOUT_VERSION
        self._words[_WORLD_SIZE] = world_size
        fence()
        self._words[_MAGIC] = HEARTBEAT_MAGIC
        self._closed = False

    @classmethod
    def create(cls, name: str, world_size: int, directory: Path | str = DEFAULT_DIRECTORY) -> HeartbeatReader:
        """A new segment for ranks 0 .. world_size - 1. Raises SharedMemoryError as Segment.create does."""
        if world_size < 1:
            raise SharedMemoryError(f"heartbeats {name}: world size must be at least 1, not {world_size}")
        return cls(Segment.create(name, (1 + world_size) * _LINE_BYTES, directory), world_size)

    def ages(self) -> list[float]:
        """Seconds since each rank's last beat; inf for one that never beat."""
        return [record.age for record in self.records()]

    def records(self) -> list[Heartbeat]:
        """Every rank's record, by rank."""
        return [self._record(rank, time.monotonic_ns()) for rank in range(self._world_size)]

    def close(self) -> None:
        """Remove the segment. Calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._words.release()
        self._segment.unlink()
        self._segment.close()

    def _record(self, rank: int, now_ns: int) -> Heartbeat:
        start = (1 + rank) * _LINE_WORDS
        pid, beat_ns, num_steps, epoch = self._words[start : start + 4].tolist()
        # A beat between our look at the clock and at the word must not give a negative age.
        age = max(0.0, (now_ns - beat_ns) / 1e9) if beat_ns else math.inf
        return Heartbeat(pid, age, num_steps, epoch)


class HeartbeatWriter:
    """One rank's side: beats when told to, and every 0.5 s from a daemon thread while the process runs."""

    def __init__(self, segment: Segment, rank: int, epoch: int) -> None:
        self._segment = segment
        self._words = segment.buffer.cast("Q")
        self._start = (1 + rank) * _LINE_WORDS
        self._words[self._start + _PID] = os.getpid()
        self._words[self._start + _EPOCH] = epoch
        self._stop = threading.Event()
        self.beat(0)
        self._thread = threading.Thread(target=self._run, name="draftline-heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def attach(
        cls, name: str, rank: int, epoch: int = 0, directory: Path | str = DEFAULT_DIRECTORY
    ) -> HeartbeatWriter:
        """Begin to beat as `rank`. Raises SharedMemoryError when the segment is missing or lacks the rank."""
        segment = Segment.attach(name, directory)
        problem = _problem(segment, rank)
        if problem:
            segment.close()
            raise SharedMemoryError(f"heartbeats {name}: {problem}")
        return cls(segment, rank, epoch)

    def beat(self, num_steps: int | None = None) -> None:
        """Say "alive now"; with `num_steps`, also how many steps are done."""
        if num_steps is not None:
            self._words[self._start + _STEPS] = num_steps
        self._words[self._start + _BEAT_NS] = time.monotonic_ns()

    def close(self) -> None:
        """Stop beating; the last record stays. Calling it twice is harmless."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self._words.release()
        self._segment.close()

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self.beat()


def _problem(segment: Segment, rank: int) -> str:
    if segment.size < 2 * _LINE_BYTES:
        return f"segment of {segment.size} bytes is too small"
    with segment.buffer[:_LINE_BYTES].cast("Q") as words:
        if words[_MAGIC] != HEARTBEAT_MAGIC:
            return "the segment holds something else"
        if words[_VERSION] != HEARTBEAT_LAYOUT_VERSION:
            return f"layout version {words[_VERSION]}, this process speaks {HEARTBEAT_LAYOUT_VERSION}"
        if not 0 <= rank < words[_WORLD_SIZE]:
            return f"no rank {rank} in a world of {words[_WORLD_SIZE]}"
    return ""
