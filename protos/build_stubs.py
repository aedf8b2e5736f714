"""Build hook of the distribution: stubs from protos/draftline/v1/*.proto, and the worker's CPU kernels.

Also runnable by hand (`python protos/build_stubs.py`) after a change to a .proto file; it then builds the stubs only.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand where only grpcio-tools is installed
    BuildHookInterface = object  # type: ignore[assignment,misc]


def build_stubs(root: Path) -> Path:
    """Compiles every .proto of `root`/protos; returns the folder of the stubs.

    Raises RuntimeError with protoc's exit code when a file does not compile (protoc prints why).
    """
    from grpc_tools import protoc

    protos = root / "protos"
    out = root / "clients" / "python"
    sources = sorted(str(path.relative_to(protos)) for path in protos.glob("draftline/v1/*.proto"))
    arguments = [
        "protoc",
        f"--proto_path={protos}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *sources,
    ]
    code = protoc.main(arguments)
    if code != 0:
        raise RuntimeError(f"protoc ended with code {code} on {', '.join(sources)}")
    package = out / "draftline" / "v1"
    (package / "__init__.py").write_text('"""Generated stubs of protos/draftline/v1."""\n', encoding="utf-8")
    return package


def build_kernels(root: Path) -> Path | None:
    """Compiles the CPU kernels (gpu_worker/kernels/build.py); None where there is no compiler: torch serves then."""
    path = root / "gpu_worker" / "kernels" / "build.py"
    spec = importlib.util.spec_from_file_location("draftline_kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    library: Path | None = module.build_kernels(root)
    return library


class DraftlineBuildHook(BuildHookInterface):  # type: ignore[misc,valid-type]
    """Runs before hatchling collects files, for wheels, sdists and editable installs alike."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        build_stubs(root)
        if self.target_name == "wheel" and build_kernels(root) is not None:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


if __name__ == "__main__":
    print(build_stubs(Path(__file__).resolve().parent.parent), file=sys.stderr)
