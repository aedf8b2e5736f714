"""A head's files as named tensors: a safetensors directory, one .safetensors file, or an untrusted .pt / .bin."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from gpu_worker.errors import ModelError
from gpu_worker.weights.safetensors_checkpoint import read_json, weight_files

_TORCH_SUFFIXES = (".pt", ".bin", ".pth")


class HeadFiles:
    """Tensors by the names of their files, read one by one, with config.json's object ({} where there is none)."""

    def __init__(self, path: Path) -> None:
        """`path` is a directory or one weight file, with config.json in it or beside it. Raises ModelError."""
        self.path = path
        directory = path if path.is_dir() else path.parent
        self.config_path = directory / "config.json"
        self.config: dict[str, Any] = read_json(self.config_path) if self.config_path.exists() else {}
        self._opened: dict[str, _Opened] = {}
        for file in _weight_files(path):
            opened = _Pickled(file) if file.suffix in _TORCH_SUFFIXES else _Safetensors(file)
            self._opened.update(dict.fromkeys(opened.names, opened))
        self.names = frozenset(self._opened)

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ModelError when the tensor is missing."""
        return self._file(name).shape(name)

    def where(self, name: str) -> Path:
        """The file that holds a tensor. Raises ModelError when none does."""
        return self._file(name).path

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The floating-point tensor `name`.

        Raises ModelError when it is missing, of another shape or type, or not finite.
        """
        file = self._file(name)
        found = file.shape(name)
        if found != shape:
            raise ModelError(f"{file.path}: tensor {name} has shape {list(found)}, expected {list(shape)}")
        tensor = file.read(name)
        if not tensor.is_floating_point():
            raise ModelError(
                f"{file.path}: tensor {name} has type {tensor.dtype}, expected a floating-point type"
            )
        if not _is_finite(tensor):  # it would be served without a word, and never draft a token that is right
            raise ModelError(f"{file.path}: tensor {name} holds values that are not finite")
        return tensor

    def read_integers(self, name: str) -> torch.Tensor:
        """The one-dimensional integer (or bool) tensor `name` as int64. Raises ModelError."""
        file = self._file(name)
        tensor = file.read(name)
        if tensor.is_floating_point() or tensor.ndim != 1:
            shape = list(tensor.shape)
            raise ModelError(
                f"{file.path}: tensor {name} has type {tensor.dtype} and shape {shape}, expected a list of integers"
            )
        return tensor.to(torch.int64)

    def need_config(self) -> None:
        """Raises ModelError where there is no config.json, for layouts whose tensors do not say everything."""
        if not self.config_path.exists():
            raise ModelError(f"{self.config_path.parent}: has no config.json")

    def error(self, message: str) -> ModelError:
        """A ModelError about config.json."""
        return ModelError(f"{self.config_path}: {message}")

    def _file(self, name: str) -> _Opened:
        file = self._opened.get(name)
        if file is None:
            raise ModelError(f"{self.path}: tensor {name} is in none of the weight files")
        return file


class _Opened(Protocol):
    path: Path
    names: list[str]

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> torch.Tensor: ...


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: cannot be read as safetensors: {error}") from error
        self.names: list[str] = list(self._file.keys())  # type: ignore[no-untyped-call]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


class _Pickled:
    """torch.save's format. Heads come from strangers, and a pickle may run code: only plain tensors are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(f"{path}: cannot be read as tensors alone (weights_only): {reason}") from error
        if not isinstance(content, dict) or not all(isinstance(v, torch.Tensor) for v in content.values()):
            raise ModelError(f"{path}: holds a {type(content).__name__}, expected a dictionary of tensors")
        self._tensors: dict[str, torch.Tensor] = content
        self.names = list(content)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is infinite or NaN; the extremes tell, without a copy of a vocabulary's rows."""
    if tensor.element_size() == 1:  # torch compares no 8-bit floats
        tensor = tensor.float()
    return tensor.numel() == 0 or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def _weight_files(path: Path) -> list[Path]:
    """The files to read: those of safetensors where there are any, else the only pickled one."""
    if path.is_file():
        if path.suffix not in (".safetensors", *_TORCH_SUFFIXES):
            raise ModelError(f"{path}: not a head's weights: expected .safetensors, .pt, .pth or .bin")
        return [path]
    if any(path.glob("*.safetensors")):
        return weight_files(path)
    pickled = sorted(file for file in path.iterdir() if file.suffix in _TORCH_SUFFIXES)
    if len(pickled) == 1:
        return pickled
    if pickled:
        names = ", ".join(file.name for file in pickled)
        raise ModelError(f"{path}: has several weight files; name one of {names}")
    raise ModelError(f"{path}: no head's weights here: neither *.safetensors nor *.pt, *.pth or *.bin")
