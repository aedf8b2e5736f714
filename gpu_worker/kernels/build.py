"""Compiles the CPU kernels when the package is installed; also runnable by hand (`python gpu_worker/kernels/build.py`).

Imports nothing of the package: the build hook loads this file before anything is installed.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY = Path("gpu_worker", "kernels", "cpu", "libdraftline_cpu.so")

# Contraction would fuse a multiplication and an addition here but not there: then the same row could get other bits
# in another place of the code. Fused operations are written out where they are meant.
_COMMON = (
    "-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi",
)  # fmt: skip
_AVX512 = (
    "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c", "-mprfchw",
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",  # GCC 12's own intrinsics headers
)  # fmt: skip
# Flags of the kernels' translation units; the others are compiled for any processor.
_X86_KERNELS = {
    "kernels_avx512bf16": ("-O3", *_AVX512, "-mavx512bf16"),
    "kernels_avx512": ("-O3", *_AVX512),
    "kernels_avx2": ("-O3", "-mavx2", "-mfma", "-mf16c", "-mprfchw"),
}
_X86_MACHINES = ("x86_64", "AMD64")


def find_compiler() -> list[str] | None:
    """The C++ compiler's command: CXX if set, else the first of c++, g++, clang++ on the path, else None."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    return next(([path] for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def build_kernels(root: Path, extra_flags: Sequence[str] = (), output: Path | None = None) -> Path | None:
    """Builds the shared library from `root`/gpu_worker/kernels/cpu; returns its path.

    Returns None, after one warning on stderr, where the kernels cannot be built: not Linux, no C++ compiler, or one
    that fails. The worker then runs on torch alone, several times slower on a CPU. `extra_flags` are for sanitizer
    builds, which go to `output`.
    """
    library = output or root / LIBRARY
    compiler = find_compiler()
    if compiler is None or not sys.platform.startswith("linux"):
        reason = (
            "no C++ compiler (CXX, c++, g++, clang++)"
            if compiler is None
            else f"not Linux but {sys.platform}"
        )
        _give_up(reason)
        return None
    sources = sorted((root / LIBRARY.parent).glob("*.cpp"))
    x86 = platform.machine() in _X86_MACHINES
    defines = ["-DDL_HAVE_X86=1"] if x86 else []
    if x86 and _accepts(compiler, "-mavx512bf16"):
        defines.append("-DDL_HAVE_AVX512BF16=1")
    with tempfile.TemporaryDirectory() as scratch:
        commands, objects = [], []
        for source in sources:
            flags: Sequence[str] = ("-O2",)
            if source.stem in _X86_KERNELS:
                if not x86 or (source.stem == "kernels_avx512bf16" and len(defines) < 2):
                    continue
                flags = _X86_KERNELS[source.stem]
            target = Path(scratch) / f"{source.stem}.o"
            objects.append(str(target))
            commands.append(
                [*compiler, *_COMMON, *flags, *defines, *extra_flags, "-c", str(source), "-o", str(target)]
            )
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = list(pool.map(_run, commands))
        partial = library.with_suffix(f".{os.getpid()}.tmp")  # a running process keeps the library it mapped
        link = [*compiler, "-shared", "-pthread", *extra_flags, *objects, "-o", str(partial)]
        for result in (*results, *([_run(link)] if not any(r.returncode for r in results) else [])):
            if result.returncode != 0:
                _give_up(f"the compiler failed:\n{result.stderr[-2000:]}")
                return None
    partial.replace(library)
    return library


def _give_up(reason: str) -> None:
    print(
        f"warning: the CPU kernels were not built: {reason}."
        " Workers will compute with torch alone, several times slower on a CPU.",
        file=sys.stderr,
    )


def _accepts(compiler: Sequence[str], flag: str) -> bool:
    command = [*compiler, flag, "-x", "c++", "-fsyntax-only", "-"]
    return _run(command).returncode == 0


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input="", capture_output=True, text=True, check=False)
    except OSError as error:  # CXX names something that does not run
        return subprocess.CompletedProcess(command, 127, "", str(error))


if __name__ == "__main__":
    sys.exit(0 if build_kernels(Path(__file__).resolve().parents[2]) else 1)
