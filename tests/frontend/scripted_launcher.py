"""`python -m tests.frontend.scripted_launcher NOTES NAME=ARGUMENTS...`: the launcher's supervisor, scripted parts."""

from __future__ import annotations

import asyncio
import sys

from scheduler_svc import logs
from scheduler_svc.launcher import _say_ready
from scheduler_svc.supervisor import Part, Supervisor


def main() -> int:
    notes, *scripts = sys.argv[1:]
    logs.configure("launcher")
    parts = []
    for script in scripts:
        name, _, arguments = script.partition("=")
        parts.append(
            Part(
                name,
                "tests.frontend.scripted_part",
                ("--name", name, "--notes", notes, *arguments.split()),
                reports_ready=name == "frontend",
            )
        )
    return asyncio.run(Supervisor(parts, _say_ready).run())


if __name__ == "__main__":
    sys.exit(main())
