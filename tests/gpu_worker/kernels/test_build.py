"""Building and loading: warnings and errors where no compiler or no fitting library is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker.kernels import build, native
from gpu_worker.kernels.native import Isa, KernelError, NativeKernels

_ROOT = Path(__file__).resolve().parents[3]


def test_without_a_compiler_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.build_kernels(_ROOT, output=tmp_path / "library.so") is None
    captured = capsys.readouterr()
    assert captured.err.count("warning: the CPU kernels were not built: no C++ compiler") == 1
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["/no/such/compiler", "false"])
def test_a_compiler_that_fails_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    monkeypatch.setenv("CXX", command)
    assert build.build_kernels(_ROOT, output=tmp_path / "library.so") is None
    assert "the compiler failed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_cxx_chooses_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "ccache g++ -g")
    assert build.find_compiler() == ["ccache", "g++", "-g"]


def test_the_build_imports_nothing_of_the_package() -> None:
    """The build hook loads the file before anything is installed."""
    path = str(_ROOT / "gpu_worker/kernels/build.py")
    code = f"import runpy, sys; runpy.run_path({path!r}); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_a_library_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    with pytest.raises(KernelError, match=r"broken\.so: cannot be loaded"):
        NativeKernels(broken)


def test_no_library_means_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "_LIBRARY", tmp_path / "missing.so")
    native.load.cache_clear()
    try:
        assert native.load() is None
        assert native.isa() == ""
    finally:
        native.load.cache_clear()


def test_the_portable_kernels_run_everywhere() -> None:
    kernels = native.load()
    assert kernels is not None
    assert Isa.PORTABLE in kernels.supported_isas()
    assert kernels.isa is max(kernels.supported_isas())
    assert native.isa() == kernels.isa.name.lower()
