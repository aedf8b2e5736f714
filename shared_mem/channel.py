"""What scheduler and workers use: a ring with its doorbell; plans go out on one, results come back.

Either end may create the segment; the other attaches. The creator removes it on close. One thread per object.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import zmq

from shared_mem.doorbell import RECHECK_SECONDS, ReaderDoorbell, WriterDoorbell, remove_socket_files
from shared_mem.errors import ChannelTimeout, SharedMemoryError
from shared_mem.ring import RingReader, RingWriter
from shared_mem.ring_layout import RingHeader, ring_size
from shared_mem.segment import DEFAULT_DIRECTORY, Segment

_End = TypeVar("_End")


class ChannelWriter:
    """The sending end. Make it with `create` or `attach`."""

    def __init__(self, segment: Segment, address: str, context: zmq.Context[Any]) -> None:
        self.name = segment.name
        self._segment = segment
        self._address = address
        self._closed = False
        self._ring = RingWriter(segment.buffer, segment.name)
        try:
            self._doorbell = WriterDoorbell(context, address, self._ring.num_readers)
        except SharedMemoryError:
            self._ring.close()
            raise

    @classmethod
    def create(
        cls,
        name: str,
        capacity: int,
        num_readers: int,
        address: str,
        context: zmq.Context[Any],
        directory: Path | str = DEFAULT_DIRECTORY,
    ) -> ChannelWriter:
        """A new channel of `capacity` bytes (rounded up) for readers 0 .. num_readers - 1.

        Raises SharedMemoryError when the segment cannot be made or the address is not usable.
        """
        segment = _create_ring(name, capacity, num_readers, directory)
        return _opened(segment, lambda: cls(segment, address, context))

    @classmethod
    def attach(
        cls, name: str, address: str, context: zmq.Context[Any], directory: Path | str = DEFAULT_DIRECTORY
    ) -> ChannelWriter:
        """Write to a channel that its reader created. Raises RingError when somebody does already."""
        segment = Segment.attach(name, directory)
        return _opened(segment, lambda: cls(segment, address, context))

    def send(self, data: bytes, timeout: float) -> None:
        """Hand the message to every reader; waits `timeout` seconds at most for space.

        Raises ChannelTimeout, naming the slow readers: then no reader gets this message, unless the very same
        object is sent again next, which goes on where the wait ended.
        """
        if self._ring.try_write(data):
            self._ring_armed_readers()
            return
        deadline = time.monotonic() + timeout
        try:
            while True:
                self._ring_armed_readers()
                self._ring.want_space()
                head = self._ring.head
                if self._ring.try_write(data):
                    break
                if self._ring.head != head:
                    continue  # some frames went in: ring for these, and want space for what is left
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise self._timeout(data, timeout)
                self._doorbell.wait(min(remaining, RECHECK_SECONDS))
        finally:
            self._ring.stop_wanting_space()
        self._ring_armed_readers()

    def close(self) -> None:
        """Let go of everything; the creator removes the segment. Calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        num_readers = self._ring.num_readers
        self._doorbell.close()
        self._ring.close()
        _close_segment(self._segment, self._address, num_readers)

    def __enter__(self) -> ChannelWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ring_armed_readers(self) -> None:
        for index in self._ring.take_armed_readers():
            self._doorbell.ring(index)

    def _timeout(self, data: bytes, timeout: float) -> ChannelTimeout:
        slow = self._ring.slow_readers()
        return ChannelTimeout(
            f"channel {self.name}: no space for a message of {len(data)} bytes within {timeout:g} s: "
            + "; ".join(slow.values()),
            tuple(slow),
        )


class ChannelReader:
    """The receiving end of reader `reader_index`. Make it with `attach` or `create`."""

    def __init__(self, segment: Segment, reader_index: int, address: str, context: zmq.Context[Any]) -> None:
        self.name = segment.name
        self._segment = segment
        self._address = address
        self._closed = False
        self._ring = RingReader(segment.buffer, segment.name, reader_index)
        try:
            self._doorbell = ReaderDoorbell(context, address, reader_index)
        except SharedMemoryError:
            self._ring.detach()
            self._ring.close()
            raise

    @classmethod
    def attach(
        cls,
        name: str,
        reader_index: int,
        address: str,
        context: zmq.Context[Any],
        directory: Path | str = DEFAULT_DIRECTORY,
    ) -> ChannelReader:
        """Take a reader's place, once: it gets every message from the first one on.

        Raises SharedMemoryError when there is no such channel, RingError when it has no such place or the
        place is taken.
        """
        segment = Segment.attach(name, directory)
        return _opened(segment, lambda: cls(segment, reader_index, address, context))

    @classmethod
    def create(
        cls,
        name: str,
        capacity: int,
        address: str,
        context: zmq.Context[Any],
        directory: Path | str = DEFAULT_DIRECTORY,
    ) -> ChannelReader:
        """A new channel with this process as its only reader; the writer attaches."""
        segment = _create_ring(name, capacity, 1, directory)
        return _opened(segment, lambda: cls(segment, 0, address, context))

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a zmq.Poller: readable when messages may have come; then, and after a timeout, `drain`."""
        return self._doorbell.socket

    def take(self) -> bytes | None:
        """The next message if one is there. Asks for no doorbell: call `drain` before going to sleep."""
        return self._next()

    def drain(self) -> list[bytes]:
        """All complete messages, without waiting. Afterwards `socket` becomes readable at the next one."""
        self._doorbell.consume()
        messages = []
        while True:
            message = self._next()
            if message is not None:
                messages.append(message)
            elif not self._ring.arm():
                return messages

    def receive(self, timeout: float | None) -> bytes | None:
        """The next message; None when none came within `timeout` seconds (None: wait without end)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self._next()
            if message is not None:
                return message
            if self._ring.arm():
                continue
            wait = RECHECK_SECONDS
            if deadline is not None:
                wait = min(wait, deadline - time.monotonic())
                if wait <= 0:
                    return None
            self._doorbell.wait(wait)
            self._doorbell.consume()

    def close(self) -> None:
        """Leave the channel: the writer no longer waits for this reader. Calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        num_readers = self._ring.num_readers
        if self._ring.detach():
            self._doorbell.ring()
        self._doorbell.close()
        self._ring.close()
        _close_segment(self._segment, self._address, num_readers)

    def __enter__(self) -> ChannelReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> bytes | None:
        message = self._ring.try_read()
        # Also without a message: frames of an unfinished one free space too.
        if self._ring.take_space_report():
            self._doorbell.ring()
        return message


def _create_ring(name: str, capacity: int, num_readers: int, directory: Path | str) -> Segment:
    if num_readers < 1:
        raise SharedMemoryError(f"channel {name}: num_readers must be at least 1, not {num_readers}")
    segment = Segment.create(name, ring_size(capacity, num_readers), directory)
    RingHeader.initialise(segment.buffer, capacity, num_readers)
    return segment


def _opened(segment: Segment, make: Callable[[], _End]) -> _End:
    """What `make` makes of the segment; when it fails, the segment goes too."""
    try:
        return make()
    except BaseException:
        if segment.is_creator:
            segment.unlink()
        segment.close()
        raise


def _close_segment(segment: Segment, address: str, num_readers: int) -> None:
    if segment.is_creator:
        remove_socket_files(address, num_readers)
        segment.unlink()
    segment.close()
