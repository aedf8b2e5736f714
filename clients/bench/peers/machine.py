"""Facts of the machine, and the memory that a tree of processes keeps resident."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

# What decides how fast matrices are multiplied, of the dozens that a processor lists.
_ISA_FLAGS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


def machine_facts() -> dict[str, Any]:
    """Processor, cores this process may use, instruction sets, memory, system, load."""
    info = _first_processor()
    flags = (info.get("flags") or info.get("Features") or "").split()
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": [flag for flag in _ISA_FLAGS if flag in flags],
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def multiplies_bfloat16(facts: dict[str, Any]) -> bool:
    """Whether 16-bit weights are the fast choice here; elsewhere engines emulate them."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(facts["isa"]))


def tree_memory(pid: int) -> tuple[int, str]:
    """Bytes that a process and all its descendants keep resident, and how they were counted.

    "pss": pages shared within the tree count once. "rss", where another user's smaps cannot be read: they
    count once per process.
    """
    total, kind = 0, "pss"
    for process in _tree(pid):
        try:
            total += process.memory_full_info().pss
        except psutil.AccessDenied:
            total += process.memory_info().rss
            kind = "rss"
        except psutil.NoSuchProcess:
            continue
    return total, kind


class OtherLoad:
    """How busy the rest of the machine is while an engine is measured: its figures are worth that much less.

    Counts what this process and a tree of processes do not use; short-lived children outside count too.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._start = self._now()

    def cores(self) -> float:
        """Cores kept busy by others since the start, on average."""
        seconds, busy, own = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return max(0.0, busy - own) / seconds

    def _now(self) -> tuple[float, float, float]:
        """Clock, and seconds of work of the whole machine, and of this process with the tree."""
        whole = psutil.cpu_times()
        own = sum(psutil.Process().cpu_times()[:2])
        for process in _tree(self._pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                own += sum(process.cpu_times()[:2])
        idle = whole.idle + getattr(whole, "iowait", 0.0)
        return time.perf_counter(), sum(whole) - idle - _counted_twice(whole), own


def _counted_twice(times: Any) -> float:
    """Guests' time is part of `user` and `nice` on Linux."""
    return float(getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0))


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _first_processor() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
