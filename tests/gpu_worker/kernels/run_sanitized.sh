#!/bin/sh
# Builds the CPU kernels with AddressSanitizer and UndefinedBehaviorSanitizer and runs their tests on that build.
# Usage: run_sanitized.sh [pytest arguments]; PYTHON names the interpreter (default .venv/bin/python).
set -eu
root=$(cd "$(dirname "$0")/../../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$root"
"$python" - "$scratch/libdraftline_cpu.so" <<'PY'
import sys
from pathlib import Path

sys.path.insert(0, "gpu_worker/kernels")
from build import build_kernels

flags = ["-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
sys.exit(0 if build_kernels(Path("."), flags, Path(sys.argv[1])) else 1)
PY
compiler=${CXX:-g++}
# Python itself is not sanitised: the runtime comes first, and what Python keeps until it exits is no leak of ours.
# No thread of a test may outlive it, so what the kernels leak would show in their own tests of threads and memory.
LD_PRELOAD="$($compiler -print-file-name=libasan.so) $($compiler -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1 \
  DRAFTLINE_TEST_KERNELS="$scratch/libdraftline_cpu.so" \
  "$python" -m pytest tests/gpu_worker/kernels -q -s -p no:cacheprovider --deselect tests/gpu_worker/kernels/test_build.py "$@"
