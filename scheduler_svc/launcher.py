"""`draftline-server`: checks what it can at once, starts the parts, says READY, and supervises them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from scheduler_svc import logs
from scheduler_svc.config import ServerConfig
from scheduler_svc.errors import StartupError
from scheduler_svc.flags import Role, parse
from scheduler_svc.listen import ListenAddress
from scheduler_svc.runtime_dir import runtime_dir
from scheduler_svc.supervisor import Part, ReadyReport, Supervisor
from shared_mem.segment import sweep_stale


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code: 0 after a drain, 1 when a part was lost, 2 when the service cannot start."""
    try:
        launch = parse(arguments)
        return 0 if launch is None else _serve(launch.config, launch.role)
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


def _serve(config: ServerConfig, role: Role) -> int:
    logs.configure("launcher", config.log_level)
    if role is not Role.ALL and not config.runtime_dir:
        raise StartupError(
            f"runtime_dir: --role {role} needs --runtime-dir, where the other parts look for it"
        )
    if role is not Role.SCHEDULER:
        ListenAddress.parse(config.listen).check_free()
        if config.admin_listen:
            ListenAddress.parse(config.admin_listen, "admin_listen").check_free()
        if config.metrics_listen:
            ListenAddress.parse_tcp(config.metrics_listen, "metrics_listen").check_free()
    with runtime_dir(config.runtime_dir, role) as directory:
        config_file = directory / f"{role}-{os.getpid()}.json"
        config_file.write_bytes(msgspec.json.encode(config))
        try:
            return asyncio.run(Supervisor(_parts(config, role, config_file, directory), _say_ready).run())
        finally:
            config_file.unlink(missing_ok=True)
            if role is not Role.FRONTEND:
                sweep_stale()  # what a scheduler that had to be killed left in shared memory


def _parts(config: ServerConfig, role: Role, config_file: Path, directory: Path) -> list[Part]:
    """In the order in which they stop: what takes requests first, what computes them last."""
    arguments = ("--config-json", str(config_file), "--runtime-dir", str(directory))
    grace = config.drain_grace_seconds
    frontend = Part("frontend", "scheduler_svc.frontend.process", arguments, grace, reports_ready=True)
    scheduler = Part("scheduler", "scheduler_svc.scheduler.process", arguments, grace)
    worker = Part("worker", "gpu_worker.worker", arguments)
    return {
        Role.ALL: [frontend, scheduler, worker],
        Role.SCHEDULER: [scheduler],
        Role.FRONTEND: [frontend],
    }[role]


def _say_ready(report: ReadyReport) -> None:
    try:
        print(f"READY listen={report.listen} model={report.model}", flush=True)
    except BrokenPipeError:  # nobody waits for it; the service serves all the same
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)


if __name__ == "__main__":
    sys.exit(main())
