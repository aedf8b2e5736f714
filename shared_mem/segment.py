"""Bottom of the path between scheduler and workers: a named piece of shared memory that outlives any reader.

A segment is a file (in /dev/shm unless told otherwise) that every process maps.
multiprocessing.shared_memory is not used: its resource tracker unlinks a segment when a process that only
attached exits.

Life and death: the creator holds an exclusive flock on the file for as long as it lives. The kernel drops
the lock with the process, however it ends and in whatever pid namespace, so a file whose lock can be taken
is stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import stat
from pathlib import Path
from types import TracebackType

from shared_mem.errors import SharedMemoryError

DEFAULT_DIRECTORY = Path("/dev/shm")
BELL_SUFFIX = ".bell"  # a doorbell's socket file lies beside its segment: <segment>.bell.<reader index>

_PREFIX = "draftline-"
_NAME = re.compile(r"draftline-[A-Za-z0-9_-]+")
_BELL_NAME = re.compile(rf"(?P<segment>{_NAME.pattern}){re.escape(BELL_SUFFIX)}(\.\d+)?")


def segment_name(instance: str, what: str) -> str:
    """`draftline-<instance>-<what>`; both parts of letters, digits, `_` and `-`, else SharedMemoryError."""
    return _checked(f"{_PREFIX}{instance}-{what}")


def sweep_stale(directory: Path | str = DEFAULT_DIRECTORY) -> list[str]:
    """Remove every segment in `directory` whose creator is dead, and doorbell files that lost their segment.

    Returns the removed names. A segment of a living creator is never touched, not even one that is being
    created at this moment (see Segment.create). What may not be opened, because another user owns it, is
    left alone.
    """
    directory = Path(directory)
    names = sorted(entry.name for entry in os.scandir(directory) if entry.name.startswith(_PREFIX))
    removed = [name for name in names if _NAME.fullmatch(name) and _remove_if_stale(directory / name)]
    for name in names:
        bell = _BELL_NAME.fullmatch(name)
        # A reader binds its bell only once it has attached, so a bell without a segment belongs to nobody.
        if bell and not (directory / bell["segment"]).exists() and _is_socket(directory / name):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                (directory / name).unlink()
                removed.append(name)
    return removed


class Segment:
    """One mapped segment, made with `create` or `attach`; only its creator may `unlink` it."""

    def __init__(self, path: Path, fd: int, size: int, is_creator: bool) -> None:
        self.path = path
        self.name = path.name
        self.size = size
        self.is_creator = is_creator
        self._fd = fd
        self._map = mmap.mmap(fd, size)
        self._buffer = memoryview(self._map)
        self._closed = False

    @classmethod
    def create(cls, name: str, size: int, directory: Path | str = DEFAULT_DIRECTORY) -> Segment:
        """A new segment of `size` zero bytes, all of them allocated now, locked by this process.

        Raises SharedMemoryError when the name is taken, or when the file system lacks the space: without the
        allocation a full /dev/shm would show itself later, as a SIGBUS in the middle of a step.
        """
        if size <= 0:
            raise SharedMemoryError(f"segment {name!r}: size must be at least 1 byte, not {size}")
        path = Path(directory) / _checked(name)
        fd = _create_locked(path)
        try:
            os.posix_fallocate(fd, 0, size)
            return cls(path, fd, size, is_creator=True)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise SharedMemoryError(
                f"cannot allocate segment {path}: {size} bytes needed, {_free_bytes(path.parent)} bytes free "
                f"in {path.parent} ({error.strerror})"
            ) from error

    @classmethod
    def attach(cls, name: str, directory: Path | str = DEFAULT_DIRECTORY) -> Segment:
        """Map an existing segment. Raises SharedMemoryError when it is missing, not ours to open or empty."""
        path = Path(directory) / _checked(name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise SharedMemoryError(f"cannot attach to segment {path}: {error.strerror}") from error
        size = os.fstat(fd).st_size
        if size == 0:
            os.close(fd)
            raise SharedMemoryError(f"cannot attach to segment {path}: it is empty")
        return cls(path, fd, size, is_creator=False)

    @property
    def buffer(self) -> memoryview:
        """The segment's bytes, writable. Release views made of it before `close`."""
        return self._buffer

    def close(self) -> None:
        """Unmap; the creator gives its lock back. The file stays until `unlink`. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        # A view that somebody still holds keeps the mapping alive until it goes; the lock must not wait for
        # that.
        with contextlib.suppress(BufferError):
            self._buffer.release()
            self._map.close()
        if self.is_creator:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)

    def unlink(self) -> None:
        """Remove the name; whoever has the segment mapped keeps it. For the creator only, before its `close`.

        Raises SharedMemoryError in a process that only attached.
        """
        if not self.is_creator:
            raise SharedMemoryError(f"segment {self.path} was only attached here: its creator unlinks it")
        if not self._closed and _same_file(self.path, self._fd):
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_creator:
            self.unlink()
        self.close()


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SharedMemoryError(
            f"segment name {name!r} is not {_PREFIX}<instance>-<what> of letters, digits, '_' and '-'"
        )
    return name


def _create_locked(path: Path) -> int:
    """A new file that this process has locked: the descriptor.

    Between open and flock a sweeper may take the lock first and remove the file. Whoever then gets the lock
    holds it on a file without a name, sees that, and starts again; once the name is seen under the lock no
    sweeper can remove it.
    """
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise SharedMemoryError(f"cannot create segment {path}: {error.strerror}") from error
        fcntl.flock(fd, fcntl.LOCK_EX)
        if _same_file(path, fd):
            return fd
        os.close(fd)


def _remove_if_stale(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The name may by now belong to a newer file, whose creator lives.
        if not _same_file(path, fd):
            return False
        path.unlink()
    except (BlockingIOError, FileNotFoundError, PermissionError):
        return False
    finally:
        os.close(fd)
    return True


def _same_file(path: Path, fd: int) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
