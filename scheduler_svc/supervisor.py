"""Runs the parts of a service as processes, watches them, and ends them in order: nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import structlog

_STOP_SECONDS = 10.0  # for a part to end once asked to, beyond its grace: last messages, segments, sockets
_IMPATIENT_STOP_SECONDS = 2.0

log = structlog.get_logger()


@dataclass(frozen=True)
class Part:
    """One process: `python -m module *arguments`."""

    name: str
    module: str
    arguments: tuple[str, ...]
    grace_seconds: float = 0.0  # how long it may go on with its work after SIGTERM
    reports_ready: bool = False  # takes --ready-fd N and writes a ReadyReport, as one JSON line, to it


class ReadyReport(msgspec.Struct, frozen=True):
    """What a frontend reports once it serves."""

    listen: str
    model: str


class Supervisor:
    """Runs parts until a signal comes or one of them ends. Use once, from a process's main thread.

    Parts are started all at once and stopped one after the other, in the order given. They live in sessions
    of their own, so that Ctrl-C reaches this process alone, and die with it (scheduler_svc/child.py).
    """

    def __init__(self, parts: Sequence[Part], on_ready: Callable[[ReadyReport], None]) -> None:
        self._parts = parts
        self._on_ready = on_ready
        self._processes: dict[Part, asyncio.subprocess.Process] = {}
        self._exits: dict[Part, asyncio.Task[int]] = {}
        self._ready_pipes: list[asyncio.StreamReader] = []
        self._serving = False
        self._signalled = asyncio.Event()
        self._impatient = asyncio.Event()  # a second signal: stop without grace

    async def run(self) -> int:
        """Exit code: 0 after SIGTERM or SIGINT, 2 if a part cannot start (it says why), 1 if one is lost."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        readers: list[asyncio.Task[None]] = []
        signalled = asyncio.create_task(self._signalled.wait())
        try:
            for part in self._parts:
                await self._start(part)
            readers = [asyncio.create_task(self._read_report(pipe)) for pipe in self._ready_pipes]
            self._serving = not readers
            await asyncio.wait({signalled, *self._exits.values()}, return_when=asyncio.FIRST_COMPLETED)
            lost = {} if self._signalled.is_set() else self._ended()
        finally:
            for task in (signalled, *readers):
                task.cancel()
            await self._stop_all()
        return self._exit_code(lost)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._signalled.is_set():
            self._impatient.set()
        log.info("stopping", signal=number.name, now=self._impatient.is_set())
        self._signalled.set()

    async def _start(self, part: Part) -> None:
        command = [
            sys.executable,
            "-P",  # modules come from the installation, never from the directory we were started in
            "-m",
            "scheduler_svc.child",
            str(os.getpid()),
            part.module,
            *part.arguments,
        ]
        fds: tuple[int, ...] = ()
        if part.reports_ready:
            read_end, write_end = os.pipe()
            fds = (write_end,)
            command += ["--ready-fd", str(write_end)]
            pipe = asyncio.StreamReader()
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(pipe), os.fdopen(read_end, "rb")
            )
            self._ready_pipes.append(pipe)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # our own stdout is for the READY line alone
                pass_fds=fds,
                start_new_session=True,
            )
        finally:
            for fd in fds:
                os.close(fd)
        self._processes[part] = process
        self._exits[part] = asyncio.create_task(process.wait())
        log.info("started", part=part.name, pid=process.pid)

    async def _read_report(self, pipe: asyncio.StreamReader) -> None:
        line = await pipe.readline()
        if line:  # else the part ended, which its exit tells
            self._serving = True
            self._on_ready(msgspec.json.decode(line, type=ReadyReport))

    def _ended(self) -> dict[Part, int]:
        return {part: task.result() for part, task in self._exits.items() if task.done()}

    def _exit_code(self, lost: dict[Part, int]) -> int:
        """Says which part was lost, unless it could not start and so said why itself."""
        if not lost:
            return 0
        # A part that cannot start makes others fail too; the one that says why may be the later one.
        if not self._serving and 2 in self._ended().values():
            return 2
        part, code = next(iter(lost.items()))
        if self._serving:
            log.error("part_lost", part=part.name, code=code)
        else:
            print(
                f"error: the {part.name} ended with code {code} while starting", file=sys.stderr, flush=True
            )
        return 1

    async def _stop_all(self) -> None:
        """Ends the parts in order, each with its grace; after a second signal all at once."""
        for part in self._parts:
            if part in self._processes and not self._impatient.is_set():
                self._terminate(part)
                grace = part.grace_seconds if self._serving else 0.0
                await self._wait_ended([part], grace + _STOP_SECONDS)
        for part in self._processes:
            self._terminate(part)
        await self._wait_ended(list(self._processes), _IMPATIENT_STOP_SECONDS, patient=False)
        for part, process in self._processes.items():
            if not self._exits[part].done():
                log.error("killed", part=part.name, pid=process.pid)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        await asyncio.gather(*self._exits.values())

    def _terminate(self, part: Part) -> None:
        if not self._exits[part].done():
            with contextlib.suppress(ProcessLookupError):
                self._processes[part].terminate()

    async def _wait_ended(self, parts: Sequence[Part], seconds: float, *, patient: bool = True) -> None:
        """Until the parts have ended or the time is over; patient: or a second signal came."""
        ended = asyncio.ensure_future(asyncio.wait({self._exits[part] for part in parts})) if parts else None
        if ended is None:
            return
        impatient = asyncio.create_task(self._impatient.wait())
        others = {impatient} if patient else set()
        try:
            await asyncio.wait({ended, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            impatient.cancel()
