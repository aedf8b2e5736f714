"""Starts a draft model from some of the target's layers, and writes it as `--draft-model` takes it.

Its directory holds no embedding and no output rows: the service lends it the target's, which it was trained with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpu_worker.models.config import ARCHITECTURES, ModelConfig
from gpu_worker.models.heads.tensors import DRAFT_IDS
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.export import write_checkpoint
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.modules.draft_model import DraftModel


def new_draft_model(target: FrozenTarget, num_layers: int) -> DraftModel:
    """Copies the target's first layers, its last layer and its norm.

    Raises TrainingError for more layers than it has, or a target whose frequencies its configuration could not hold.
    """
    count = target.config.num_layers
    if not 1 <= num_layers <= count:
        raise TrainingError(f"layers: {num_layers}, the target has {count}")
    if target.config.rope.frequency_divisors:
        raise TrainingError(
            "target: its rotary frequencies have divisors of their own, which a draft model's config.json cannot say"
        )
    module = DraftModel(target.config, num_layers)
    sources = [*range(num_layers - 1), count - 1]
    with torch.no_grad():
        for layer, source in zip(module.layers, sources, strict=True):
            for name, parameter in layer.named_parameters():
                parameter.copy_(target.layer_tensor(source, name, tuple(parameter.shape)))
        module.norm.weight.copy_(target.final_norm)
    return module


def export_draft_model(
    directory: Path, module: DraftModel, target: FrozenTarget, draft_ids: torch.Tensor, card: str
) -> int:
    """Writes the layers and the final norm in bfloat16, and the ids to draft; the size of the weights in bytes."""
    tensors = {
        f"model.{name}": value.detach().to(torch.bfloat16).contiguous()
        for name, value in module.state_dict().items()
    }
    if len(draft_ids) < target.config.vocab_size:
        tensors[DRAFT_IDS] = draft_ids.long()
    return write_checkpoint(directory, tensors, _hub_config(target.config, len(module.layers)), card)


def _hub_config(model: ModelConfig, num_layers: int) -> dict[str, Any]:
    rope = model.rope
    assert not rope.frequency_divisors, "refused before training"
    scaling: dict[str, Any] | None = None
    if rope.kind != "default":
        scaling = {"rope_type": rope.kind, "factor": rope.factor}
        if rope.kind in ("llama3", "yarn"):
            scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
        if rope.kind == "llama3":
            scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        if rope.kind == "yarn":
            scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
            scaling["attention_factor"] = rope.attention_factor
    return {
        "architectures": [model.architecture],
        "model_type": ARCHITECTURES[model.architecture].model_type,
        "vocab_size": model.num_embeddings,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": model.qkv_bias,
        "mlp_bias": False,
        "eos_token_id": list(model.eos_token_ids),
        "torch_dtype": "bfloat16",
    }
