"""The `draftline` command; `main` is the entry point of the console script."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    """Runs the command on this process's arguments and exits."""
    # gRPC's core, which reads this when it loads, would log connection trouble beside our own line about it.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from draftline.cli.app import build_app

    for stream in (sys.stdout, sys.stderr):
        # A terminal of another encoding must not end a stream half-way.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    build_app()()
