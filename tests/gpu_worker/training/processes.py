"""Python processes of their own, as torchrun starts them: one thread each, no accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the interpreter from the repository's root; what it printed and its exit code."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
