"""A draft model that `fit` goes on from: layers that it made before, and the ids that they draft."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.models.base import EMBEDDING
from gpu_worker.models.heads.tensors import DRAFT_IDS
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.modules.draft_model import DraftModel
from gpu_worker.weights.draft_checkpoint import read_draft_ids
from gpu_worker.weights.resolve import resolve_model
from gpu_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint

# Of its config.json, as the target has it: the same widths could be split into heads in another way.
_FORM = (
    "architecture",
    "num_embeddings",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rope",
    "rms_norm_eps",
    "qkv_bias",
    "mlp_bias",
    "output_bias",
)


@dataclass(frozen=True)
class StartingDraftModel:
    """Decoder layers and norm that borrow their target's embedding and output rows: what export_draft_model writes."""

    module: DraftModel
    ids: torch.Tensor  # [V] int64: those that it drafts

    @classmethod
    def load(cls, spec: str, target: FrozenTarget, num_layers: int) -> StartingDraftModel:
        """spec: a directory or hub id; num_layers: 0 or as many as it has.

        Raises ModelError for what cannot be read, TrainingError for one that is of another form than the target.
        """
        source = resolve_model(spec)
        checkpoint = SafetensorsCheckpoint(source.path)
        if checkpoint.has(EMBEDDING):
            raise TrainingError(
                f"{spec}: has an embedding of its own; only layers that borrow the target's are trained on"
            )
        config, model = checkpoint.config, target.config
        if num_layers not in (0, config.num_layers):
            raise TrainingError(
                f"layers: {num_layers}, the draft model to start from has {config.num_layers}"
            )
        for field in _FORM:
            if getattr(config, field) != getattr(model, field):
                raise TrainingError(
                    f"{spec}: {field} is {getattr(config, field)}, the target's {getattr(model, field)}"
                )
        module = DraftModel(model, config.num_layers)
        expected = {f"model.{name}" for name, _ in module.named_parameters()} | {DRAFT_IDS}
        if unknown := sorted(checkpoint.names - expected):
            raise TrainingError(f"{spec}: tensor {unknown[0]} is none that a draft model is trained with")
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(checkpoint.read(f"model.{name}", tuple(parameter.shape)))
        ids = read_draft_ids(checkpoint, model.vocab_size)
        return cls(module, torch.arange(model.vocab_size) if ids is None else ids)
