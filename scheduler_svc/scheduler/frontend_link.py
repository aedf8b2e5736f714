"""The scheduler's socket towards all frontends: messages in, messages out, who is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import structlog
import zmq

from scheduler_svc.errors import StartupError
from scheduler_svc.messages import (
    FrontendHello,
    FrontendMessage,
    ServiceStatus,
    decode_frontend_message,
    encode,
)
from scheduler_svc.scheduler.events import Outbound

log = structlog.get_logger()


class FrontendLink:
    """A ROUTER socket; frontends are known by the identity that ZeroMQ gives each connection."""

    def __init__(self, address: str, context: zmq.Context[Any]) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        # A limit would drop token events. Frontends read at once and bound what they keep per stream.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tells when a frontend has gone
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.socket.close()
            raise StartupError(f"scheduler socket {address}: {error}") from error
        self._greeted: dict[bytes, None] = {}

    def receive(self) -> Iterator[tuple[bytes, FrontendMessage]]:
        """All messages that have come, with their senders; what is no message is logged and dropped."""
        while self.socket.poll(0):
            frontend, data = self.socket.recv_multipart()[:2]
            try:
                message = decode_frontend_message(data)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                log.error("bad_frontend_message", error=str(error))
                continue
            if isinstance(message, FrontendHello):
                self._greeted[frontend] = None
            yield frontend, message

    def send(self, outbound: list[Outbound]) -> set[bytes]:
        """Sends messages in order; returns the frontends that turned out to be gone."""
        gone: set[bytes] = set()
        for item in outbound:
            if item.frontend in gone:
                continue
            try:
                self.socket.send_multipart([item.frontend, encode(item.message)], zmq.DONTWAIT)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                gone.add(item.frontend)
                self._greeted.pop(item.frontend, None)
        return gone

    def broadcast(self, status: ServiceStatus) -> set[bytes]:
        """Tells every frontend that has said hello; returns those that turned out to be gone."""
        return self.send([Outbound(frontend, status) for frontend in self._greeted])

    def close(self) -> None:
        """Closes the socket once what was sent is out, within a second."""
        self.socket.close()
