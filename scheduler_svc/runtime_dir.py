"""The directory that holds a service's sockets: private, found free of other services, gone at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from scheduler_svc.errors import StartupError

_PREFIX = "draftline-"
_SCHEDULER_SOCKETS = ("scheduler.sock", "control.sock")
_LONGEST_SOCKET = "/scheduler.sock"
_YOUNG_SECONDS = 10.0
_MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path less its end mark


@contextlib.contextmanager
def runtime_dir(wished: str, role: str) -> Iterator[Path]:
    """Gives the directory for as long as the service runs; `role` is locked in it, against a second one.

    A private directory (`wished` is "") is removed at the end; in one that was asked for only the lock and
    the sockets that appeared meanwhile are, and a scheduler alone leaves those of frontends, which outlive it.
    Frontends may share one: they take no lock. Raises StartupError.
    """
    private = not wished
    try:
        if private:
            _sweep_stale()
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_short_temporary_directory()))
        else:
            path = Path(wished).absolute()
            if len(os.fsencode(path)) + len(_LONGEST_SOCKET) > _MAX_SOCKET_PATH_BYTES:
                raise StartupError(f"runtime_dir: {path} is too long: a socket's path has at most 107 bytes")
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"runtime_dir: {wished or tempfile.gettempdir()}: {error.strerror}") from error
    before = set(path.iterdir())
    lock = _lock(path, role)
    try:
        yield path
    finally:
        if private:
            shutil.rmtree(path, ignore_errors=True)
        elif lock is not None:
            lock_path = path / f"{role}.lock"
            for file in set(path.iterdir()) - before:
                is_own = role != "scheduler" or file.name in _SCHEDULER_SOCKETS
                if file == lock_path or (file.is_socket() and is_own):
                    file.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)


def _lock(path: Path, role: str) -> int | None:
    """An open, locked file; the lock lasts as long as this process, however it ends."""
    if role == "frontend":
        return None
    try:
        lock = os.open(path / f"{role}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartupError(f"runtime_dir: {path}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise StartupError(f"runtime_dir: {path} is in use by a running service") from error
    return lock


def _short_temporary_directory() -> str:
    directory = tempfile.gettempdir()
    longest = len(os.fsencode(directory)) + len(f"/{_PREFIX}12345678{_LONGEST_SOCKET}")
    return directory if longest <= _MAX_SOCKET_PATH_BYTES else "/tmp"


def _sweep_stale() -> None:
    """Removes private directories whose service was killed: their lock is free."""
    for path in Path(_short_temporary_directory()).glob(f"{_PREFIX}*"):
        lock_path = path / "all.lock"
        with contextlib.suppress(OSError):
            facts = lock_path.stat()
            # A young one may be about to be locked.
            if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < _YOUNG_SECONDS:
                continue
            lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
