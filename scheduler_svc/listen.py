"""Listen addresses of the command line: parsed once, tried before anything expensive starts."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass

from scheduler_svc.errors import StartupError

_UNIX_PREFIX = "unix:"


@dataclass(frozen=True)
class ListenAddress:
    """HOST:PORT (path is "") or unix:PATH (host is "", port is 0)."""

    field: str  # the setting it came from, named in errors
    text: str  # as written; also gRPC's own spelling
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str, field: str = "listen") -> ListenAddress:
        """Reads `127.0.0.1:50051`, `[::1]:50051`, `name:0` or `unix:/run/x.sock`. Raises StartupError."""
        if text.startswith(_UNIX_PREFIX):
            path = text.removeprefix(_UNIX_PREFIX)
            if not path:
                raise StartupError(f"{field}: {text!r} names no socket path")
            return cls(field, text, "", 0, path)
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if (
            not colon
            or not host
            or not port.isascii()
            or not port.isdigit()
            or (":" in host and not bracketed)
        ):
            raise StartupError(f"{field}: {text!r} is neither HOST:PORT nor unix:PATH")
        if int(port) > 65535:
            raise StartupError(f"{field}: {text}: port {port} is above 65535")
        return cls(field, text, host.strip("[]"), int(port), "")

    @classmethod
    def parse_tcp(cls, text: str, field: str) -> ListenAddress:
        """The same where only HOST:PORT will do. Raises StartupError."""
        address = cls.parse(text, field)
        if address.path:
            raise StartupError(f"{field}: {text!r} is not HOST:PORT")
        return address

    def check_free(self) -> None:
        """Raises StartupError when nothing can listen here, e.g. `listen: HOST:PORT: address already in use`.

        Binds for a moment; a socket path is connected to instead, since a bind would take a live server's.
        """
        if self.path:
            self._check_path_free()
            return
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (socket.gaierror, UnicodeError) as error:
            raise StartupError(f"{self.field}: {self.text}: unknown host {self.host!r}") from error
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: connections of the last server in TIME_WAIT do not count as `in use`.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen(1)
            except OSError as error:
                raise StartupError(f"{self.field}: {self.text}: {_reason(error)}") from error

    def with_port(self, port: int) -> str:
        """The address in gRPC's spelling with the port that was really bound."""
        return self.text if self.path else f"{self.text.rpartition(':')[0]}:{port}"

    def _check_path_free(self) -> None:
        folder = os.path.dirname(os.path.abspath(self.path))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise StartupError(f"{self.field}: {self.text}: cannot create a socket in {folder}")
        if len(os.fsencode(self.path)) > 107:
            raise StartupError(f"{self.field}: {self.text}: a socket path has at most 107 bytes")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(self.path)
            except (FileNotFoundError, ConnectionRefusedError):  # free, or left behind by a dead server
                return
            except OSError as error:
                raise StartupError(f"{self.field}: {self.text}: {_reason(error)}") from error
        raise StartupError(f"{self.field}: {self.text}: address already in use")


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "address already in use"
    return (error.strerror or str(error)).lower()
