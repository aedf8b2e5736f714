"""Beside ring.py: ZeroMQ sockets over which a ring's two ends wake each other, so that nobody spins.

Every reader binds a socket of its own and the writer connects to each of them. A connecting socket queues
what is sent before the other side exists, so a ring is not lost when the reader comes later; a bound one
would drop it. A doorbell carries no data: what it means is always read from the ring.
"""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Any

import zmq

from shared_mem.errors import SharedMemoryError
from shared_mem.segment import BELL_SUFFIX, DEFAULT_DIRECTORY

# A doorbell that got lost (a reset connection) delays a message by this much at most.
RECHECK_SECONDS = 0.1

_POLLIN = int(zmq.POLLIN)  # as an enum it would cost more than the call that it is compared with
_RECONNECT_MS = (10, 100)  # first and longest pause between tries to reach a reader that is not there


def doorbell_address(name: str, directory: Path | str = DEFAULT_DIRECTORY) -> str:
    """The ipc address for a segment's doorbells: socket files beside it, which sweep_stale knows."""
    return f"ipc://{Path(directory) / name}{BELL_SUFFIX}"


def reader_address(address: str, index: int) -> str:
    """Where reader `index` binds: ipc and inproc get `.<index>` appended, tcp the port plus `index`.

    Raises SharedMemoryError for a tcp address without a number as its port.
    """
    if not address.startswith("tcp://"):
        return f"{address}.{index}"
    match = re.fullmatch(r"(tcp://.+):(\d+)", address)
    if match is None:
        raise SharedMemoryError(f"doorbell address {address!r} has no port number")
    return f"{match[1]}:{int(match[2]) + index}"


def remove_socket_files(address: str, num_readers: int) -> None:
    """Remove what killed readers left behind; does nothing for other transports and abstract ipc names."""
    for index in range(num_readers):
        _remove_socket_file(reader_address(address, index))


class WriterDoorbell:
    """The writer's end: one socket per reader."""

    def __init__(self, context: zmq.Context[Any], address: str, num_readers: int) -> None:
        self._sockets: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        for index in range(num_readers):
            socket = context.socket(zmq.DEALER)
            socket.linger = 0
            socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MS
            self._sockets.append(socket)
            self._poller.register(socket, zmq.POLLIN)
            try:
                socket.connect(reader_address(address, index))
            except zmq.ZMQError as error:
                self.close()
                raise SharedMemoryError(
                    f"doorbell cannot connect to {reader_address(address, index)}: {error}"
                ) from error

    def ring(self, index: int) -> None:
        """Wake reader `index`. A full queue is no loss: then an earlier ring is still unread."""
        _send(self._sockets[index])

    def wait(self, timeout: float) -> None:
        """Sleep until some reader reports free space, `timeout` seconds at most."""
        for socket, _ in self._poller.poll(_milliseconds(timeout)):
            _consume(socket)

    def close(self) -> None:
        """Close the sockets; nothing lingers."""
        for socket in self._sockets:
            socket.close(linger=0)


class ReaderDoorbell:
    """A reader's end: one bound socket, readable when the writer rang."""

    def __init__(self, context: zmq.Context[Any], address: str, index: int) -> None:
        self._address = reader_address(address, index)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.linger = 0
        try:
            self.socket.bind(self._address)
        except zmq.ZMQError as error:
            self.socket.close(linger=0)
            raise SharedMemoryError(f"doorbell cannot bind {self._address}: {error}") from error
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)

    def ring(self) -> None:
        """Tell the writer that space is free. Without a connection yet, the writer finds out by itself."""
        _send(self.socket)

    def wait(self, timeout: float) -> None:
        """Sleep until the writer rings, `timeout` seconds at most."""
        self._poller.poll(_milliseconds(timeout))

    def consume(self) -> None:
        """Take every ring that has come; do so before reading the ring, never after."""
        _consume(self.socket)

    def close(self) -> None:
        """Close the socket and remove its file."""
        self.socket.close(linger=0)
        _remove_socket_file(self._address)


def _send(socket: zmq.Socket[bytes]) -> None:
    with contextlib.suppress(zmq.Again):
        socket.send(b"", zmq.DONTWAIT)


def _consume(socket: zmq.Socket[bytes]) -> None:
    # asked first: running into Again would cost more than the ring
    while int(socket.getsockopt(zmq.EVENTS)) & _POLLIN:
        socket.recv(zmq.DONTWAIT)


def _milliseconds(seconds: float) -> int:
    # Rounded up: rounded down, the last millisecond of a wait would be spent spinning.
    return max(0, math.ceil(seconds * 1000))


def _remove_socket_file(address: str) -> None:
    path = address.removeprefix("ipc://")
    if path != address and not path.startswith("@"):
        Path(path).unlink(missing_ok=True)
