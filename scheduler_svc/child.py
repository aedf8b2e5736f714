"""First lines of every child process: it dies with its launcher, then becomes the module it was started for.

`python -m scheduler_svc.child PARENT_PID MODULE ARGUMENTS...` is `python -m MODULE ARGUMENTS...` then on.
Asking the kernel from inside the child needs no code between fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """SIGTERM reaches this process when its parent ends, however it does; exits if that was before."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(1)


def main() -> None:
    """Entry point; see the module's text."""
    die_with_parent(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[:2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
