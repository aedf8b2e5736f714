"""What `make demo` shows: the whole service on the CPU, one streamed answer with its speculation statistics.

Starts `draftline-server` with the embedded model on a free port, asks one question through the `draftline`
command, prints what the service says of itself, and stops it cleanly.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

QUESTION = (
    "Rewrite this as a numbered list: Wash the rice. Soak the rice for ten minutes. Bring the water to a boil. "
    "Add the rice to the boiling water. Let the rice rest."
)


def main() -> int:
    """Returns the exit code of the first step that failed, or 0."""
    commands = Path(sys.executable).parent
    started = time.perf_counter()
    server = subprocess.Popen(
        [commands / "draftline-server", "--listen", "127.0.0.1:0", "--log-level", "warning"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        ready = server.stdout.readline().strip()
        if not ready.startswith("READY "):
            print("the service did not start", file=sys.stderr)
            return server.wait() or 1
        print(f"{ready}   ({time.perf_counter() - started:.1f} s)\n", flush=True)
        address = dict(field.split("=", 1) for field in ready.split()[1:])["listen"]
        draftline = [commands / "draftline"]
        answer = [
            "generate",
            "--server",
            address,
            "--chat",
            QUESTION,
            "--max-tokens",
            "128",
            "--temperature",
            "0",
        ]
        print(f"> {QUESTION}\n", flush=True)
        code = subprocess.call([*draftline, *answer, "--show-drafts"])
        print(flush=True)
        code = code or subprocess.call([*draftline, "info", "--server", address])
    finally:
        server.send_signal(signal.SIGTERM)
        stopped = server.wait(timeout=60)
    print(f"\nthe service stopped with exit code {stopped}")
    return code or stopped


if __name__ == "__main__":
    sys.exit(main())
