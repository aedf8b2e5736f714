"""Segments: allocation, naming, who may remove them, and what happens when their creator dies."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared_mem import segment as segment_module
from shared_mem.errors import SharedMemoryError
from shared_mem.segment import DEFAULT_DIRECTORY, Segment, segment_name, sweep_stale
from tests.shared_mem.conftest import Spawn


def test_attached_sees_what_the_creator_wrote_and_outlives_the_name(name: str, tmp_path: Path) -> None:
    with Segment.create(name, 5000, tmp_path) as created:
        assert created.size == 5000
        assert bytes(created.buffer) == bytes(5000)
        attached = Segment.attach(name, tmp_path)
        created.buffer[4990:4995] = b"hello"
        assert bytes(attached.buffer[4990:4995]) == b"hello"
    assert not (tmp_path / name).exists()
    assert bytes(attached.buffer[4990:4995]) == b"hello"
    attached.close()
    attached.close()


def test_default_directory_is_dev_shm(name: str) -> None:
    with Segment.create(name, 1) as created:
        assert created.path == Path("/dev/shm") / name
        assert created.path.stat().st_mode & 0o777 == 0o600


def test_only_the_creator_unlinks(name: str, tmp_path: Path) -> None:
    with Segment.create(name, 64, tmp_path):
        attached = Segment.attach(name, tmp_path)
        with pytest.raises(SharedMemoryError, match=f"{name} was only attached here"):
            attached.unlink()
        attached.close()
        assert (tmp_path / name).exists()


def test_unlink_leaves_a_successor_of_the_same_name(name: str, tmp_path: Path) -> None:
    first = Segment.create(name, 64, tmp_path)
    (tmp_path / name).unlink()
    with Segment.create(name, 64, tmp_path):
        first.unlink()
        first.close()
        assert (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("draftline-../etc/passwd", "letters, digits"),
        ("other-a-plan", "letters, digits"),
        ("draftline-", "letters, digits"),
    ],
)
def test_foreign_names_are_refused(bad: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryError, match=message):
        Segment.create(bad, 64, tmp_path)
    with pytest.raises(SharedMemoryError, match=message):
        Segment.attach(bad, tmp_path)


def test_segment_name() -> None:
    assert segment_name("a1", "plan") == "draftline-a1-plan"
    with pytest.raises(SharedMemoryError, match="a/b"):
        segment_name("a/b", "plan")


def test_faults_name_the_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryError, match=f"{tmp_path}/{name}: No such file"):
        Segment.attach(name, tmp_path)
    with pytest.raises(SharedMemoryError, match="at least 1 byte, not 0"):
        Segment.create(name, 0, tmp_path)
    with pytest.raises(SharedMemoryError, match=f"{tmp_path}/none/{name}: No such file"):
        Segment.create(name, 64, tmp_path / "none")
    with Segment.create(name, 64, tmp_path), pytest.raises(SharedMemoryError, match="File exists"):
        Segment.create(name, 64, tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(SharedMemoryError, match="is empty"):
        Segment.attach(name, tmp_path)


@pytest.fixture
def small_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with room for 256 KiB; where mounting is not permitted, one that says that it is full."""
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True
    )
    if mount.returncode != 0:

        def full(fd: int, offset: int, length: int) -> None:
            if length > 256 * 1024:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(segment_module.os, "posix_fallocate", full)
    yield tmp_path
    if mount.returncode == 0:
        subprocess.run(["umount", tmp_path], check=True)


def test_full_file_system_is_found_at_creation(name: str, small_directory: Path) -> None:
    with pytest.raises(
        SharedMemoryError,
        match=rf"{small_directory}/{name}: 1048576 bytes needed, \d+ bytes free in .*No space",
    ):
        Segment.create(name, 1 << 20, small_directory)
    assert not list(small_directory.iterdir())
    with Segment.create(name, 1 << 10, small_directory):
        pass


def test_attach_and_exit_leaves_the_segment_and_a_clean_stderr(name: str, spawn: Spawn) -> None:
    with Segment.create(name, 64) as created:
        peer = spawn("attach", name, DEFAULT_DIRECTORY)
        out, err = peer.communicate(timeout=20)
        assert (peer.returncode, out, err) == (0, "", "")
        assert created.buffer[0] == 42
        assert created.path.exists()


def test_sweep_removes_what_a_killed_creator_left_and_nothing_else(
    name: str, tmp_path: Path, spawn: Spawn
) -> None:
    dead, alive = name + "-dead", name + "-alive"
    killed, living = spawn("create", dead, tmp_path), spawn("create", alive, tmp_path)
    (tmp_path / "unrelated").touch()
    assert sweep_stale(tmp_path) == []
    killed.send_signal(signal.SIGKILL)
    killed.wait(20)
    with Segment.create(name, 64, tmp_path):
        assert sweep_stale(tmp_path) == [dead]
        assert {path.name for path in tmp_path.iterdir()} == {"unrelated", alive, name}
    out, err = living.communicate(timeout=20)
    assert (living.returncode, out, err) == (0, "", "")
    assert sweep_stale(tmp_path) == [alive]


def test_attached_processes_do_not_keep_a_stale_segment_alive(name: str, tmp_path: Path) -> None:
    created = Segment.create(name, 64, tmp_path)
    attached = Segment.attach(name, tmp_path)
    assert sweep_stale(tmp_path) == []
    created.close()
    assert sweep_stale(tmp_path) == [name]
    attached.close()


def test_sweep_follows_no_links_and_waits_for_no_pipes(name: str, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    (tmp_path / name).symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / (name + "-pipe"))
    assert sweep_stale(tmp_path) == []
    assert (tmp_path / "precious").exists()


def test_sweep_removes_doorbells_without_a_segment(name: str, tmp_path: Path) -> None:
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    with Segment.create(name, 64, tmp_path):
        sockets[0].bind(str(tmp_path / f"{name}.bell.0"))
        sockets[1].bind(str(tmp_path / f"{name}-gone.bell.0"))
        assert sweep_stale(tmp_path) == [f"{name}-gone.bell.0"]
    assert sweep_stale(tmp_path) == [f"{name}.bell.0"]
    assert not list(tmp_path.iterdir())
    for each in sockets:
        each.close()


def test_sweep_between_open_and_lock_of_a_creation(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweeper wins the race for the lock of a file that is just being made: its creator starts again."""
    swept: list[list[str]] = []
    flock = fcntl.flock

    def sweep_first(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not swept:
            swept.append([])
            swept[0] = sweep_stale(tmp_path)
        flock(fd, operation)

    monkeypatch.setattr(segment_module.fcntl, "flock", sweep_first)
    with Segment.create(name, 64, tmp_path) as created:
        assert swept == [[name]]
        attached = Segment.attach(name, tmp_path)
        created.buffer[0] = 7
        assert attached.buffer[0] == 7
        assert sweep_stale(tmp_path) == []
        attached.close()


def test_sweeping_all_the_time_never_takes_a_living_segment(name: str, tmp_path: Path) -> None:
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            sweep_stale(tmp_path)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for i in range(200):
            with Segment.create(f"{name}-{i}", 64, tmp_path) as created:
                assert created.path.stat().st_ino == os.fstat(created._fd).st_ino
    finally:
        stop.set()
        sweeper.join()
    assert not list(tmp_path.iterdir())
