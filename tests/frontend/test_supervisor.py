"""The launcher's supervision, with scripted parts: readiness, order of the end, losses, signals, orphans."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READY = "READY listen=127.0.0.1:7 model=m\n"


class Launcher:
    """A launcher process in a group of its own, and what its parts noted."""

    def __init__(self, notes: Path, *scripts: str) -> None:
        self._notes = notes
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.frontend.scripted_launcher", str(notes), *scripts],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def notes(self, event: str) -> list[str]:
        """Names of parts in the order in which the event happened to them."""
        return [name for name, _ in self._lines(event)]

    def pids(self) -> list[int]:
        return [pid for _, pid in self._lines("started")]

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == READY
        self.wait_started(3)

    def wait_started(self, count: int) -> None:
        until(lambda: len(self.pids()) == count)

    def end(self) -> tuple[int, str, str]:
        """(exit code, rest of stdout, stderr); every part is gone by then."""
        output, errors = self.process.communicate(timeout=20)
        assert not [pid for pid in self.pids() if alive(pid)]
        return self.process.returncode, output, errors

    def _lines(self, event: str) -> list[tuple[str, int]]:
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        fields = [line.split() for line in lines]
        return [(name, int(pid)) for kind, name, pid in fields if kind == event]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: object, seconds: float = 15.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "notes"
    yield path
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ProcessLookupError):
            if line.startswith("started") and alive(pid := int(line.split()[2])):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C"])
def test_parts_stop_in_order_after_a_signal(notes: Path, how: str) -> None:
    launcher = Launcher(notes, "frontend=", "scheduler=", "worker=")
    launcher.wait_ready()
    if how == "Ctrl-C":
        os.killpg(launcher.process.pid, signal.SIGINT)
    else:
        launcher.process.send_signal(signal.Signals[how])
    code, output, errors = launcher.end()
    assert (code, output) == (0, "")
    assert launcher.notes("stopped") == ["frontend", "scheduler", "worker"]
    assert "worker writes to its stdout" in errors


def test_a_signal_while_starting(notes: Path) -> None:
    launcher = Launcher(notes, "scheduler=", "worker=", "frontend=--exit-after 0.9")  # never ready
    launcher.wait_started(3)
    launcher.process.terminate()
    code, output, _ = launcher.end()
    assert (code, output) == (0, "")


def test_a_lost_part_ends_the_service(notes: Path) -> None:
    launcher = Launcher(notes, "frontend=", "scheduler=", "worker=--exit-after 1.5")
    launcher.wait_ready()
    code, output, errors = launcher.end()
    assert (code, output) == (1, "")
    assert launcher.notes("stopped") == ["frontend", "scheduler"]
    assert '"event":"part_lost"' in errors


def test_a_part_that_cannot_start_has_said_why(notes: Path) -> None:
    launcher = Launcher(
        notes,
        "frontend=--exit-after 0.9",
        "scheduler=",
        "worker=--exit-after 0.3 --code 2 --error no_such_model",
    )
    code, output, errors = launcher.end()
    assert (code, output) == (2, "")
    assert [line for line in errors.splitlines() if line.startswith("error: ")] == ["error: no_such_model"]


def test_a_part_that_ends_while_starting_is_named(notes: Path) -> None:
    launcher = Launcher(notes, "scheduler=", "frontend=--exit-after 0.3 --code 3")
    code, output, errors = launcher.end()
    assert (code, output) == (1, "")
    assert "error: the frontend ended with code 3 while starting\n" in errors


def test_parts_die_with_a_killed_launcher(notes: Path) -> None:
    launcher = Launcher(notes, "frontend=", "scheduler=", "worker=")
    launcher.wait_ready()
    launcher.process.kill()
    launcher.process.communicate(timeout=20)
    until(lambda: not [pid for pid in launcher.pids() if alive(pid)])
    assert sorted(launcher.notes("stopped")) == ["frontend", "scheduler", "worker"]


def test_a_second_signal_does_not_wait(notes: Path) -> None:
    launcher = Launcher(notes, "frontend=--stubborn", "scheduler=", "worker=")
    launcher.wait_ready()
    began = time.monotonic()
    launcher.process.terminate()
    time.sleep(0.3)
    launcher.process.terminate()
    code, _, errors = launcher.end()
    assert code == 0
    assert time.monotonic() - began < 8  # not the ten seconds of patience
    assert '"event":"killed"' in errors
    assert sorted(launcher.notes("stopped")) == ["scheduler", "worker"]
