"""A process for launcher tests: reports ready, waits for SIGTERM, notes in a file what happened to it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--exit-after", type=float, default=60.0)
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--error", default="")
    parser.add_argument("--ready-fd", type=int)
    options = parser.parse_args()

    def note(event: str) -> None:
        with options.notes.open("a") as file:
            file.write(f"{event} {options.name} {os.getpid()}\n")

    def on_sigterm(signum: int, frame: FrameType | None) -> None:
        if not options.stubborn:
            note("stopped")
            sys.exit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    note("started")
    print(f"{options.name} writes to its stdout", flush=True)
    if options.ready_fd is not None and options.exit_after > 1:
        os.write(options.ready_fd, json.dumps({"listen": "127.0.0.1:7", "model": "m"}).encode() + b"\n")
        os.close(options.ready_fd)
    time.sleep(options.exit_after)
    if options.error:
        print(f"error: {options.error}", file=sys.stderr, flush=True)
    note("ended")
    return int(options.code)


if __name__ == "__main__":
    sys.exit(main())
