"""Loads a draft head, whatever layout it was published in; the one place that tells the layouts apart.

Known are our own, EAGLE-1/2, EAGLE-3, the speculators format, Medusa (two forms) and MTP modules inside a target's
checkpoint (three families). A tensor that is missing, left over or of another shape is an error, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from gpu_worker.config import LayerIdsName
from gpu_worker.errors import ModelError
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.heads.config import HeadConfig
from gpu_worker.models.heads.tensors import tensor_shapes
from gpu_worker.weights.heads import eagle, eagle3, medusa, mtp, own, speculators
from gpu_worker.weights.heads.files import HeadFiles
from gpu_worker.weights.resolve import is_hub_id

_HUB_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "*.pt", "*.bin"]


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head's configuration and all of its tensors on the CPU, in the dtype of their file."""

    config: HeadConfig
    tensors: dict[str, torch.Tensor]  # exactly the names and shapes of tensor_shapes(config)
    path: Path

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that canonical name. Raises ModelError where this head has none."""
        if name not in self.tensors:
            raise ModelError(f"{self.path}: this {self.config.kind} head has no tensor {name}")
        return self.tensors[name]


def load_head(spec: str, target: ModelConfig, layer_ids_name: LayerIdsName = "inputs") -> HeadCheckpoint:
    """The head that `spec` names (a directory, a .safetensors, .pt or .bin file, or a hub id), checked for `target`.

    layer_ids_name: what the layer ids of an EAGLE-3 checkpoint name, see weights/heads/eagle3.py. Raises ModelError
    naming the file and the tensor or field, what was found and what would be right.
    """
    path = _resolve(spec)
    files = HeadFiles(path)
    if own.matches(files, target):
        config, tensors = own.read(files, target)
    elif speculators.matches(files, target):
        config, tensors = speculators.read(files, target, layer_ids_name)
    elif medusa.matches(files, target):
        config, tensors = medusa.read(files, target)
    elif mtp.matches(files, target):
        config, tensors = mtp.read(files, target)
    elif eagle3.matches(files, target):
        config, tensors = eagle3.read(files, target, layer_ids_name)
    elif eagle.matches(files, target):
        config, tensors = eagle.read(files, target)
    else:
        some = ", ".join(sorted(files.names)[:4]) or "none"
        without = "" if files.config_path.exists() else "has no config.json, and is "
        raise ModelError(
            f"{path}: {without}not a layout of draft heads that is known (our own, EAGLE-1/2, EAGLE-3, speculators,"
            f" Medusa, MTP); its tensors: {some}{', ...' if len(files.names) > 4 else ''}"
        )
    config.check_fits(target, str(path))
    assert {name: tuple(t.shape) for name, t in tensors.items()} == tensor_shapes(config)
    return HeadCheckpoint(config, tensors, path)


def _resolve(spec: str) -> Path:
    path = Path(spec).expanduser()
    try:
        if path.exists():
            return path
    except OSError as error:
        raise ModelError(f"{spec}: {error}") from error
    if not is_hub_id(spec):
        raise ModelError(f"{spec}: no such file or directory, and not a hub id (owner/name)")
    try:
        return Path(snapshot_download(spec, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, HFValidationError) as error:  # every hub error is one of these
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{spec}: no such path here, and the hub does not give it: {reason}") from error
