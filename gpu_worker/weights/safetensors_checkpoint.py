"""A directory of safetensors as a source of tensors: one file, shards with an index, or shards without."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpu_worker.errors import ModelError
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.heads.config import SECTION
from gpu_worker.models.hf_config import parse_hf_config

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")


class SafetensorsCheckpoint:
    """Implements TensorSource."""

    def __init__(self, directory: Path) -> None:
        """Reads config files and the headers of weight files. Raises ModelError naming the file at fault."""
        self.directory = directory
        config_path = directory / "config.json"
        generation_path = directory / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        config = read_json(config_path)
        if SECTION in config and "architectures" not in config and "model_type" not in config:
            raise ModelError(f"{config_path}: this is a drafting head, not a model; it is given with --head")
        self.config: ModelConfig = parse_hf_config(config, generation, config_path)
        self._files: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        for path in weight_files(directory):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path}: cannot be read as safetensors: {error}") from error
            self._files[path] = file
            self._where.update(dict.fromkeys(file.keys(), path))  # type: ignore[no-untyped-call]

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(self._where)

    def has(self, name: str) -> bool:
        return name in self._where

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See TensorSource.read; in the file's dtype."""
        path = self._where.get(name)
        if path is None:
            raise ModelError(f"{self.directory}: tensor {name} is in none of the weight files")
        file = self._files[path]
        found = tuple(file.get_slice(name).get_shape())
        if found != shape:
            raise ModelError(f"{path}: tensor {name} has shape {list(found)}, expected {list(shape)}")
        tensor: torch.Tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(f"{path}: tensor {name} has type {tensor.dtype}, expected a floating-point type")
        return tensor

    def read_ids(self, name: str) -> torch.Tensor | None:
        """A vector of integers as int64, or None where the files have none. Raises ModelError for another shape."""
        path = self._where.get(name)
        if path is None:
            return None
        tensor: torch.Tensor = self._files[path].get_tensor(name)
        if tensor.is_floating_point() or tensor.dim() != 1:
            raise ModelError(
                f"{path}: tensor {name} is {list(tensor.shape)} {tensor.dtype}, expected a list of ids"
            )
        return tensor.long()


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up the model. Raises ModelError when one is missing."""
    index_path = directory / _INDEX
    if index_path.exists():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index_path}: weight_map is missing or empty")
        paths = [directory / name for name in sorted(set(weight_map.values()))]
    elif (directory / _SINGLE).exists():
        paths = [directory / _SINGLE]
    else:
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"{directory}: no safetensors file (other weight formats are not supported)")
        for path in list(paths):
            if match := _SHARD.match(path.name):
                count = int(match["count"])
                paths += [
                    directory / f"{match['stem']}-{number:05d}-of-{count:05d}.safetensors"
                    for number in range(1, count + 1)
                ]
        paths = sorted(set(paths))
    for path in paths:
        if not path.exists():
            raise ModelError(f"{path}: this part of the model's weights is missing")
    return paths


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError naming the file when it cannot be read or holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds a {type(content).__name__}, expected an object")
    return content
