"""A whole service in its own processes, as a user starts it; leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

SERVER = Path(sys.executable).parent / "draftline-server"


@dataclass(frozen=True)
class Exit:
    """How a server process ended."""

    code: int
    stdout: str
    stderr: str


class Service:
    """`draftline-server` with the given flags on a free port, from READY to its orderly end."""

    def __init__(self, *flags: str, listen: str = "127.0.0.1:0") -> None:
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [SERVER, "--listen", listen, *flags],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        watchdog = threading.Timer(120, self.process.kill)
        watchdog.start()
        try:
            self.ready_line = self.process.stdout.readline().strip()
        finally:
            watchdog.cancel()
        if not self.ready_line.startswith("READY "):
            self.process.wait(30)
            raise RuntimeError(f"no READY line, exit code {self.process.returncode}:\n{self.stderr()}")
        fields = dict(field.split("=", 1) for field in self.ready_line.split()[1:])
        self.address, self.model = fields["listen"], fields["model"]

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stderr(self) -> str:
        """All log lines so far."""
        self._stderr.seek(0)
        return self._stderr.read()

    def stop(self, signum: int = signal.SIGTERM, timeout: float = 60) -> Exit:
        """Asks the service to end and waits for it."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            stdout, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        return Exit(self.process.returncode, stdout, self.stderr())

    def wait_ended(self, timeout: float = 60) -> Exit:
        """Waits for a service that ends by itself."""
        stdout, _ = self.process.communicate(timeout=timeout)
        return Exit(self.process.returncode, stdout, self.stderr())

    def children(self) -> dict[str, int]:
        """Role -> pid of the service's processes."""
        import psutil

        roles = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            command = " ".join(child.cmdline())
            for role, mark in (
                ("scheduler", "scheduler_svc.scheduler"),
                ("frontend", "scheduler_svc.frontend"),
                ("worker", "gpu_worker"),
            ):
                if mark in command:
                    roles[role] = child.pid
        return roles


def run_server(*flags: str, timeout: float = 60) -> Exit:
    """Runs `draftline-server` that is expected to end by itself."""
    done = subprocess.run([SERVER, *flags], capture_output=True, text=True, timeout=timeout, check=False)
    return Exit(done.returncode, done.stdout, done.stderr)


def leftovers() -> set[str]:
    """What a service could leave behind on this machine: shared memory segments and runtime directories."""
    found = {f"/dev/shm/{path.name}" for path in Path("/dev/shm").glob("draftline-*")}
    return found | {str(path) for path in Path(tempfile.gettempdir()).glob("draftline-*")}


def run_client(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs the `draftline` command."""
    command: Sequence[str | Path] = [SERVER.parent / "draftline", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
