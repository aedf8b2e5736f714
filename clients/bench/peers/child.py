"""One engine as a child process: started in its environment, asked one job at a time, ended with its tree."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_STOP_SECONDS = 150.0  # a server drains and joins its processes meanwhile
_FAILED_STOP_SECONDS = 10.0  # the same for one that failed: it is not expected to
_TAIL_LINES = 12


class PeerFailedError(Exception):
    """The engine died, hung or cannot do what was asked; the message ends with its own last words."""


class Child:
    """Speaks runner.py's protocol with a process."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Of the process that answers: the root of everything that the engine runs."""
        return self._process.pid

    def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Sends one line and waits for the one that answers it. Raises PeerFailedError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise self._failure(f"gave no answer within {timeout:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _ended(self) -> PeerFailedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)  # its output is closed: its exit code is about to come
        return self._failure(f"ended with code {self._process.poll()}")

    def _failure(self, what: str) -> PeerFailedError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-_TAIL_LINES:]
        return PeerFailedError("\n".join([f"the engine {what}; its last lines ({self._log}):", *last]))


@contextlib.contextmanager
def started(command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[Child]:
    """Runs `command` until the block ends; stderr goes to `log`. No process of it outlives the block."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # its group is its tree: one signal reaches what it started
        )
    assert process.stdin is not None
    assert process.stdout is not None
    clean = False
    try:
        yield Child(process, log)
        clean = True
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_SECONDS if clean else _FAILED_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
