"""A service whose parts are started one by one, as by the units and containers of deploy/."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import psutil

from tests.harness.service import SERVER

_START_SECONDS = 120.0


class Process:
    """One part: a role of `draftline-server` under its launcher, or `draftline-worker`."""

    def __init__(self, *command: str | Path) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, text=True)

    def output(self) -> str:
        """Everything printed so far."""
        self._output.seek(0)
        return self._output.read()

    def wait_for(self, word: str) -> str:
        """The first line with `word`, once it is there."""
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            for line in self.output().splitlines():
                if word in line:
                    return line
            time.sleep(0.05)
        raise RuntimeError(f"no {word}, exit code {self.process.poll()}:\n{self.output()}")

    def part(self) -> psutil.Process:
        """The process that a launcher runs."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def end(self) -> int:
        """Asks it to end, if it still runs; the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


class Parts:
    """Starts parts with one settings file and one runtime directory; ends what still runs."""

    def __init__(self, directory: Path, settings: str) -> None:
        self._directory = directory
        self._config = directory / "settings.toml"
        self._config.write_text(settings, encoding="utf-8")
        self._running: list[Process] = []

    def __enter__(self) -> Parts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running:
            process.end()

    def start(self, role: str) -> Process:
        """Starts `scheduler`, `frontend` or `worker`."""
        command = [SERVER.parent / "draftline-worker"] if role == "worker" else [SERVER, "--role", role]
        process = Process(*command, "--config", self._config, "--runtime-dir", self._directory)
        self._running.append(process)
        return process
