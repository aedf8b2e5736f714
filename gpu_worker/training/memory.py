"""Host memory of a training process: what is freed is kept for the next step instead of being given back."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Makes glibc reuse large blocks. By default it maps each anew, and every step then pays for the same page faults.

    False where the C library has no mallopt. For the whole process, so only for processes that just train.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _NEVER)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
