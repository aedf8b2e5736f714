"""Under ring.py: where the words of a ring's header lie, how a frame looks, and what orders memory accesses.

Header, in 64-byte lines of little-endian 64-bit words, one line for each process that writes:

    line 0      magic, layout version, number of readers, capacity in bytes      fixed at creation
    line 1      head, wanted, writer pid                                         written by the writer
    line 2 + i  tail, state, pid, armed                                          written by reader i

`head` and `tail` count bytes since creation and never wrap; their place in the data area is taken modulo
capacity. `wanted` is the tail that every reader must reach before the waiting writer can go on (0: it does
not wait). `armed`, the one word with two writers, is 1 while a reader wants its doorbell rung; the writer
sets it to 0 when it rings.
"""

from __future__ import annotations

import struct
import sys
import threading
from enum import IntEnum, IntFlag

from shared_mem.errors import RingError

MAGIC = int.from_bytes(b"DRAFTRNG", "little")
RING_LAYOUT_VERSION = 1
MIN_CAPACITY = 1024
ALIGNMENT = 32  # of frames; a frame's header is exactly this long, so that it never wraps

# Frame header: sequence number of the frame, bytes of the whole message, bytes of this frame, FrameFlags |
# CRC-32 of those 24 bytes and the payload. Payload follows, may wrap, and is padded to ALIGNMENT.
FRAME_FIELDS = struct.Struct("<QQII")
FRAME_CHECKSUM = struct.Struct("<I4x")

_WORDS_PER_LINE = 8
_WORD = 8
_MAGIC, _VERSION, _NUM_READERS, _CAPACITY = range(4)
_HEAD, _WANTED, _WRITER_PID = range(_WORDS_PER_LINE, _WORDS_PER_LINE + 3)
_TAIL, _STATE, _PID, _ARMED = range(4)
_FIRST_READER = 2 * _WORDS_PER_LINE

_fence_lock = threading.Lock()


class FrameFlags(IntFlag):
    """A message in one frame carries both."""

    FIRST = 1
    LAST = 2


class ReaderState(IntEnum):
    """Where one reader's place in the header stands; it only ever moves forward."""

    AWAITED = 0  # nobody attached yet: counts from the first byte on
    ATTACHED = 1
    DETACHED = 2  # left: no longer counted


def fence() -> None:
    """A full memory barrier, made of the only atomic operations that Python has.

    On x86 one locked instruction would do. On ARMv8 a release followed by an acquire of the same lock orders
    everything before the first against everything after the second, which takes two rounds.
    """
    _fence_lock.acquire()
    _fence_lock.release()
    _fence_lock.acquire()
    _fence_lock.release()


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    """`size` rounded up to a multiple of `alignment` (a power of two)."""
    return (size + alignment - 1) & -alignment


def ring_size(capacity: int, num_readers: int) -> int:
    """Bytes of a segment that holds a ring of `capacity` bytes (rounded up) for `num_readers` readers."""
    return _header_size(num_readers) + _rounded_capacity(capacity)


class RingHeader:
    """Typed access to the words above; raises RingError when the buffer holds no ring of this version.

    Every word is read and written by one aligned 8-byte machine access (a cast memoryview's), which no CPU
    tears.
    """

    def __init__(self, buffer: memoryview, name: str) -> None:
        if sys.byteorder != "little":
            raise RingError(f"ring {name}: this host is big-endian, the layout is little-endian")
        if len(buffer) < _header_size(1):
            raise RingError(f"ring {name}: segment of {len(buffer)} bytes is too small for a header")
        self._buffer = buffer
        self._words = buffer[: len(buffer) // _WORD * _WORD].cast("B").cast("Q")
        if self._words[_MAGIC] != MAGIC:
            raise RingError(f"ring {name}: no ring here (magic {self._words[_MAGIC]:#x}, not {MAGIC:#x})")
        if self._words[_VERSION] != RING_LAYOUT_VERSION:
            raise RingError(
                f"ring {name}: layout version {self._words[_VERSION]}, "
                f"this process speaks {RING_LAYOUT_VERSION}"
            )
        self.num_readers = self._words[_NUM_READERS]
        self.capacity = self._words[_CAPACITY]
        self.data_offset = _header_size(self.num_readers)
        if self.data_offset + self.capacity > len(buffer):
            raise RingError(
                f"ring {name}: {self.num_readers} readers and {self.capacity} bytes do not fit its segment "
                f"of {len(buffer)} bytes"
            )

    @staticmethod
    def initialise(buffer: memoryview, capacity: int, num_readers: int) -> None:
        """Write the header of an empty ring into zeroed memory of ring_size bytes, the magic last."""
        words = buffer[: _header_size(num_readers)].cast("Q")
        words[_VERSION] = RING_LAYOUT_VERSION
        words[_NUM_READERS] = num_readers
        words[_CAPACITY] = _rounded_capacity(capacity)
        for index in range(num_readers):
            # Armed from the start, so that the first message rings a reader that polls before it ever read.
            words[_reader_word(index, _ARMED)] = 1
        fence()
        words[_MAGIC] = MAGIC
        words.release()

    @property
    def head(self) -> int:
        return self._words[_HEAD]

    @head.setter
    def head(self, value: int) -> None:
        self._words[_HEAD] = value

    @property
    def wanted(self) -> int:
        return self._words[_WANTED]

    @wanted.setter
    def wanted(self, value: int) -> None:
        self._words[_WANTED] = value

    @property
    def writer_pid(self) -> int:
        return self._words[_WRITER_PID]

    @writer_pid.setter
    def writer_pid(self, value: int) -> None:
        self._words[_WRITER_PID] = value

    def tail(self, index: int) -> int:
        """Bytes that reader `index` has consumed since creation."""
        return self._words[_reader_word(index, _TAIL)]

    def set_tail(self, index: int, value: int) -> None:
        self._words[_reader_word(index, _TAIL)] = value

    def state(self, index: int) -> ReaderState:
        return ReaderState(self._words[_reader_word(index, _STATE)])

    def set_state(self, index: int, state: ReaderState) -> None:
        self._words[_reader_word(index, _STATE)] = state

    def pid(self, index: int) -> int:
        """Process id of reader `index` in its own pid namespace; 0 before it attached."""
        return self._words[_reader_word(index, _PID)]

    def set_pid(self, index: int, pid: int) -> None:
        self._words[_reader_word(index, _PID)] = pid

    def is_armed(self, index: int) -> bool:
        return self._words[_reader_word(index, _ARMED)] != 0

    def set_armed(self, index: int, armed: bool) -> None:
        self._words[_reader_word(index, _ARMED)] = armed

    def release(self) -> None:
        """Let go of the buffer, so that its segment can be unmapped."""
        self._words.release()


def _reader_word(index: int, word: int) -> int:
    return _FIRST_READER + index * _WORDS_PER_LINE + word


def _header_size(num_readers: int) -> int:
    return (2 + num_readers) * _WORDS_PER_LINE * _WORD


def _rounded_capacity(capacity: int) -> int:
    # A quarter of the ring must be a multiple of ALIGNMENT: the largest frame is that long.
    return aligned(max(capacity, MIN_CAPACITY), 4 * ALIGNMENT)
