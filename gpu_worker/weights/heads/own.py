"""Our own layout: config.json with a section for the head, and safetensors under the canonical names."""

from __future__ import annotations

import torch

from gpu_worker.errors import ModelError
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.heads.config import SECTION, HeadConfig
from gpu_worker.models.heads.tensors import DRAFT_IDS, tensor_shapes
from gpu_worker.weights.heads.files import HeadFiles
from gpu_worker.weights.heads.mapping import read_mapped


def matches(files: HeadFiles, target: ModelConfig) -> bool:
    """Whether config.json has our section."""
    return SECTION in files.config


def read(files: HeadFiles, target: ModelConfig) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """The head as training wrote it. Raises ModelError."""
    section = files.config[SECTION]
    if not isinstance(section, dict):
        raise files.error(f"{SECTION} is a {type(section).__name__}, expected an object")
    config = HeadConfig.from_json(section, f"{files.config_path}: {SECTION}")
    config.check_fits(target, f"{files.config_path}: {SECTION}")
    ready = {}
    if DRAFT_IDS in (shapes := tensor_shapes(config)):
        ids = files.read_integers(DRAFT_IDS)
        if tuple(ids.shape) != shapes[DRAFT_IDS]:
            raise ModelError(
                f"{files.where(DRAFT_IDS)}: tensor {DRAFT_IDS} has shape {list(ids.shape)},"
                f" expected {list(shapes[DRAFT_IDS])}"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(set(ids.tolist())) != len(ids):
            raise ModelError(
                f"{files.where(DRAFT_IDS)}: tensor {DRAFT_IDS} needs distinct ids in 0..{config.vocab_size - 1}"
            )
        ready[DRAFT_IDS] = ids
    return config, read_mapped(files, config, {name: name for name in shapes}, ready, ignored=ready)
