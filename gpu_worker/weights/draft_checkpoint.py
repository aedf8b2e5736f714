"""Loads a draft model for a target: one of the same tokens, or one that borrows the target's embedding and output head.

Beside the usual tensors its files may hold `draft_ids` [V] int64, ascending: the ids that it drafts, where those are
not all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.errors import ModelError
from gpu_worker.kernels.native import ThreadTeam
from gpu_worker.models.base import EMBEDDING, CausalLM
from gpu_worker.models.heads.tensors import DRAFT_IDS
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import ModelSource, resolve_model
from gpu_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint
from gpu_worker.weights.token_map import check_same_token_map
from gpu_worker.weights.tokenizer_export import export_tokenizer

_LAYERS_PREFIX = "layers:"


@dataclass(frozen=True)
class DraftModel:
    """A causal LM that drafts, and the ids [V] int64 that it does so with; None: all."""

    model: CausalLM
    draft_ids: torch.Tensor | None = None


def load_draft_model(
    spec: str,
    target: CausalLM,
    target_tokenizer: Path,
    dtype: str,
    device: torch.device,
    team: ThreadTeam | None,
) -> DraftModel:
    """What `--draft-model` names: a model as resolve_model finds it, or `layers:N`, the target cut to N layers.

    Raises ModelError where it does not speak the target's token ids.
    """
    if spec.startswith(_LAYERS_PREFIX):
        count = spec.removeprefix(_LAYERS_PREFIX)
        if not count.isdigit() or not 1 <= int(count) <= target.num_layers:
            raise ModelError(f"draft_model: {spec!r}: layers must be 1..{target.num_layers}")
        return DraftModel(target.truncated(int(count)))
    source = resolve_model(spec)
    borrows, draft_ids = _extras(source, target.config.vocab_size)
    if not borrows:
        check_same_token_map(target_tokenizer, export_tokenizer(source))
    model = load_model(source, dtype, device, team, lender=target)
    if model.config.vocab_size < target.config.vocab_size:
        raise ModelError(
            f"draft_model: {spec}: knows {model.config.vocab_size} ids, the target {target.config.vocab_size}"
        )
    return DraftModel(model, None if draft_ids is None else draft_ids.to(model.device))


def _extras(source: ModelSource, vocab_size: int) -> tuple[bool, torch.Tensor | None]:
    """Whether the embedding is to be borrowed, and the ids that are drafted."""
    if source.kind == "gguf":
        return False, None
    checkpoint = SafetensorsCheckpoint(source.path)
    return not checkpoint.has(EMBEDDING), read_draft_ids(checkpoint, vocab_size)


def read_draft_ids(checkpoint: SafetensorsCheckpoint, vocab_size: int) -> torch.Tensor | None:
    """[V] int64: the ids that a draft model drafts; None: all. Raises ModelError for what is no list of such ids."""
    ids = checkpoint.read_ids(DRAFT_IDS)
    if ids is not None:
        ascending = len(ids) and bool((ids.diff() > 0).all())
        if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
            raise ModelError(
                f"{checkpoint.directory}: {DRAFT_IDS} must be ascending ids within 0..{vocab_size - 1}"
            )
    return ids
