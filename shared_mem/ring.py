"""Messages through a segment: one writer, n readers, every reader gets every message, in order, exactly once.

The ring never waits and never blocks: try_write and try_read say at once whether there was space or a
message. Waiting is channel.py's, with a doorbell. A message longer than a quarter of the ring travels in
several frames, so messages may be larger than the ring. Bytes are written first and the cursor after them;
sequence number, lengths and checksum of every frame are verified, so bytes that are torn raise RingError
and are never returned.

Readers that are not there: a reader that has not attached yet is counted from the first byte on, so it will
miss nothing and the writer, once the ring is full, waits for it. A reader that detached is no longer waited
for; its place is not given away again, since what it missed is gone. A reader that died without a word
stays counted: the writer's wait for it is bounded, and the timeout names it.
"""

from __future__ import annotations

import os
from zlib import crc32

from shared_mem.errors import RingError
from shared_mem.ring_layout import (
    ALIGNMENT,
    FRAME_CHECKSUM,
    FRAME_FIELDS,
    FrameFlags,
    ReaderState,
    RingHeader,
    aligned,
    fence,
)

_FIRST = int(FrameFlags.FIRST)
_LAST = int(FrameFlags.LAST)


class RingWriter:
    """The one writer of the ring in `buffer`. Raises RingError when there is no ring, or it has a writer."""

    def __init__(self, buffer: memoryview, name: str) -> None:
        self.name = name
        self._header = RingHeader(buffer, name)
        if self._header.writer_pid:
            pid = self._header.writer_pid
            self._header.release()
            raise RingError(f"ring {name}: process {pid} already writes to it")
        self._header.writer_pid = os.getpid()
        capacity = self._capacity = self._header.capacity
        self._data = buffer[self._header.data_offset : self._header.data_offset + capacity]
        self._max_payload = capacity // 4 - ALIGNMENT
        self._head = 0
        self._sequence = 0
        self._limit = capacity  # the head may go up to here, as far as known
        self._pending: bytes | None = None
        self._offset = 0  # bytes of _pending that are in the ring

    @property
    def num_readers(self) -> int:
        return self._header.num_readers

    @property
    def capacity(self) -> int:
        """Bytes of the data area."""
        return self._capacity

    @property
    def head(self) -> int:
        """Bytes written since creation, frame headers and padding included."""
        return self._head

    def try_write(self, data: bytes) -> bool:
        """Put the message into the ring: True when all of it is in.

        False when there is no space now. Call again with the same object to go on: of a long message some
        frames may be in already. Another message instead gives the unfinished one up, and readers discard
        its frames.
        """
        if data is not self._pending:
            self._pending, self._offset = data, 0
        view = memoryview(data)
        total = len(data)
        while True:
            length = min(total - self._offset, self._max_payload)
            frame = ALIGNMENT + aligned(length)
            if self._head + frame > self._limit:
                self._limit = self._slowest_tail() + self._capacity
                if self._head + frame > self._limit:
                    return False
            end = self._offset + length
            flags = (_FIRST if self._offset == 0 else 0) | (_LAST if end == total else 0)
            self._write_frame(view[self._offset : end], total, flags)
            self._offset = end
            if end == total:
                self._pending = None
                return True

    def want_space(self) -> None:
        """Ask the readers to report when a quarter of the ring is free; then try_write before sleeping."""
        # More than one frame's worth: a writer that slept for every frame would be woken for every frame.
        self._header.wanted = self._head + self._capacity // 4 - self._capacity
        fence()

    def stop_wanting_space(self) -> None:
        """Take want_space back."""
        self._header.wanted = 0

    def take_armed_readers(self) -> list[int]:
        """The readers whose doorbell must ring now; each is named once until it arms again."""
        fence()
        armed = [i for i in range(self._header.num_readers) if self._header.is_armed(i)]
        for index in armed:
            self._header.set_armed(index, False)
        return [i for i in armed if self._header.state(i) is not ReaderState.DETACHED]

    def slow_readers(self) -> dict[int, str]:
        """The readers that hold the writer back: by index, who they are and how much they have not read."""
        slowest = self._slowest_tail()
        found = {}
        for index in range(self._header.num_readers):
            state, tail = self._header.state(index), self._header.tail(index)
            if state is ReaderState.DETACHED or tail != slowest:
                continue
            who = f"pid {self._header.pid(index)}" if state is ReaderState.ATTACHED else "never attached"
            found[index] = f"reader {index} ({who}) has {self._head - tail} of {self._capacity} bytes unread"
        return found

    def close(self) -> None:
        """Let go of the buffer."""
        self._data.release()
        self._header.release()

    def _slowest_tail(self) -> int:
        header = self._header
        tails = [
            header.tail(i) for i in range(header.num_readers) if header.state(i) is not ReaderState.DETACHED
        ]
        return min(tails, default=self._head)

    def _write_frame(self, payload: memoryview, total: int, flags: int) -> None:
        length = len(payload)
        place = self._head % self._capacity
        fields = FRAME_FIELDS.pack(self._sequence, total, length, flags)
        checksum = FRAME_CHECKSUM.pack(crc32(payload, crc32(fields)))
        self._data[place : place + ALIGNMENT] = fields + checksum
        place = (place + ALIGNMENT) % self._capacity
        before_wrap = min(length, self._capacity - place)
        self._data[place : place + before_wrap] = payload[:before_wrap]
        if before_wrap < length:
            self._data[: length - before_wrap] = payload[before_wrap:]
        fence()
        self._head += ALIGNMENT + aligned(length)
        self._sequence += 1
        self._header.head = self._head


class RingReader:
    """Reader `index` of the ring in `buffer`. Raises RingError when there is no ring or no such place."""

    def __init__(self, buffer: memoryview, name: str, index: int) -> None:
        self.name = name
        self.index = index
        self._header = RingHeader(buffer, name)
        try:
            self._take_place()
        except RingError:
            self._header.release()
            raise
        self._capacity = self._header.capacity
        self._data = buffer[self._header.data_offset : self._header.data_offset + self._capacity]
        self._tail = 0
        self._head = 0  # as last seen
        self._sequence = 0
        self._parts: list[bytes] = []  # frames of a message that is not complete yet
        self._num_bytes = 0  # in _parts
        self._reported = 0  # the `wanted` that was answered last

    @property
    def num_readers(self) -> int:
        return self._header.num_readers

    def try_read(self) -> bytes | None:
        """The next complete message, or None when the ring holds none. Raises RingError for torn bytes."""
        while True:
            if self._tail == self._head:
                self._head = self._header.head
                if self._tail == self._head:
                    return None
                fence()
            total, flags, payload = self._read_frame()
            if flags & _FIRST:
                # Frames of a message before this one that never got its last frame: its writer gave it up.
                self._parts, self._num_bytes = [], 0
            elif not self._parts:
                raise self._torn("a message goes on that never began")
            self._tail += ALIGNMENT + aligned(len(payload))
            self._sequence += 1
            fence()
            self._header.set_tail(self.index, self._tail)
            fence()
            self._parts.append(payload)
            self._num_bytes += len(payload)
            if flags & _LAST:
                parts, num_bytes = self._parts, self._num_bytes
                self._parts, self._num_bytes = [], 0
                if num_bytes != total:
                    raise self._torn(f"a message of {total} bytes came as {num_bytes}")
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def arm(self) -> bool:
        """Ask for the doorbell. True when there is something to read already: read it before sleeping."""
        self._header.set_armed(self.index, True)
        fence()
        return self._header.head != self._tail

    def take_space_report(self) -> bool:
        """True when the writer waits for space that this reader has now freed: once per wait."""
        wanted = self._header.wanted
        if wanted == 0 or wanted == self._reported or self._tail < wanted:
            return False
        self._reported = wanted
        return True

    def detach(self) -> bool:
        """Leave for good: the writer no longer waits for this reader. True when it waits at this moment."""
        self._header.set_state(self.index, ReaderState.DETACHED)
        fence()
        return self._header.wanted != 0

    def close(self) -> None:
        """Let go of the buffer (and stay counted, unless detached)."""
        self._data.release()
        self._header.release()

    def _take_place(self) -> None:
        header = self._header
        if not 0 <= self.index < header.num_readers:
            raise RingError(f"ring {self.name}: no reader {self.index}, it has {header.num_readers} (from 0)")
        state = header.state(self.index)
        if state is not ReaderState.AWAITED:
            raise RingError(
                f"ring {self.name}: the place of reader {self.index} is {state.name.lower()} "
                f"(pid {header.pid(self.index)}) and is given only once"
            )
        header.set_pid(self.index, os.getpid())
        header.set_state(self.index, ReaderState.ATTACHED)

    def _read_frame(self) -> tuple[int, int, bytes]:
        available = self._head - self._tail
        place = self._tail % self._capacity
        raw = bytes(self._data[place : place + ALIGNMENT])
        sequence, total, length, flags = FRAME_FIELDS.unpack_from(raw)
        if sequence != self._sequence:
            raise self._torn(f"its sequence number is {sequence}")
        if ALIGNMENT + aligned(length) > available or available > self._capacity:
            raise self._torn(f"its length is {length}, where {available} bytes are unread")
        place = (place + ALIGNMENT) % self._capacity
        before_wrap = min(length, self._capacity - place)
        payload = bytes(self._data[place : place + before_wrap])
        if before_wrap < length:
            payload += self._data[: length - before_wrap]
        (checksum,) = FRAME_CHECKSUM.unpack_from(raw, FRAME_FIELDS.size)
        if checksum != crc32(payload, crc32(raw[: FRAME_FIELDS.size])):
            raise self._torn("its checksum does not fit its bytes")
        return total, flags, payload

    def _torn(self, what: str) -> RingError:
        return RingError(
            f"ring {self.name}, reader {self.index}: frame {self._sequence} at byte {self._tail} is torn: "
            f"{what}"
        )
