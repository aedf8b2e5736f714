"""A head as training starts it: shaped like one of the target's layers, random or copied, by kind."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from gpu_worker.models.heads.config import HeadConfig, HeadKind, decoder_head_config
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.losses import LossKind
from gpu_worker.training.modules.decoder_head import DecoderHead
from gpu_worker.training.modules.medusa import MedusaHeads
from gpu_worker.training.objective import Objective


@dataclass(frozen=True)
class HeadChoices:
    """What a person may choose; None and 0 mean the kind's default."""

    kind: HeadKind
    num_layers: int = 1
    draft_vocab_size: int = 8192
    full_norms: bool = True  # EAGLE: False leaves out what the original leaves out
    own_lm_head: bool = False
    num_medusa_heads: int = 4
    num_medusa_layers: int = 1
    recycles_normed: bool | None = None


_NEW_NORM_SCALE = 0.4

# arXiv 2503.01840 (EAGLE-3), 2401.15077 section 4.2 (EAGLE: hidden states first, a tenth of the cross-entropy, noise),
# 2401.10774 section 2.2.1 (Medusa); the MTP module is trained for later steps too, since it drafts more than one.
_OBJECTIVES: dict[str, Objective] = {
    HeadKind.EAGLE3: Objective(unroll=5, decay=0.8),
    HeadKind.MTP: Objective(unroll=4, decay=0.6, law_weight=1.0, regression_weight=0.5),
    HeadKind.EAGLE: Objective(unroll=1, decay=0.8, law_weight=0.1, regression_weight=1.0, feature_noise=0.1),
    HeadKind.MEDUSA: Objective(unroll=4, decay=0.8),
    "draft-model": Objective(unroll=1),
}


def default_objective(
    kind: str,
    *,
    unroll: int = 0,
    loss: LossKind = "cross-entropy",
    decay: float = 0.0,
    law_weight: float | None = None,
    regression_weight: float | None = None,
) -> Objective:
    """The kind's loss; 0 keeps its own unrolling and decay, None its own weights.

    Raises TrainingError for weights that leave nothing to learn, or hidden states that the kind does not give.
    """
    base = _OBJECTIVES[kind]
    law = base.law_weight if law_weight is None else law_weight
    regression = base.regression_weight if regression_weight is None else regression_weight
    if regression and not base.regression_weight:
        kinds = ", ".join(name for name, own in _OBJECTIVES.items() if own.regression_weight)
        raise TrainingError(
            f"regression_weight: {regression}, {kind} has none; trained towards hidden states: {kinds}"
        )
    if not law and not regression:
        raise TrainingError("law_weight: 0, and so is regression_weight: nothing is left to learn")
    return dataclasses.replace(
        base,
        unroll=unroll or base.unroll,
        loss=loss,
        decay=decay or base.decay,
        law_weight=law,
        regression_weight=regression,
    )


def head_config(choices: HeadChoices, target: FrozenTarget, feature_layers: tuple[int, ...]) -> HeadConfig:
    """feature_layers: those that were extracted."""
    model = target.config
    vocab_size = min(choices.draft_vocab_size or model.vocab_size, model.vocab_size)
    if choices.kind is HeadKind.MEDUSA:
        return HeadConfig(
            kind=choices.kind,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            draft_vocab_size=vocab_size,
            own_lm_head=choices.own_lm_head,
            num_medusa_heads=choices.num_medusa_heads,
            num_medusa_layers=choices.num_medusa_layers,
        )
    if choices.kind is HeadKind.EAGLE3 and not feature_layers:
        raise TrainingError("features: none of the target's layers were extracted, EAGLE-3 reads some")
    config = decoder_head_config(
        choices.kind,
        model,
        num_layers=choices.num_layers,
        draft_vocab_size=vocab_size,
        feature_layers=feature_layers,
        full_norms=choices.full_norms,
    )
    config = dataclasses.replace(config, own_lm_head=choices.own_lm_head)
    if choices.recycles_normed is not None:
        config = dataclasses.replace(config, recycles_normed=choices.recycles_normed)
    return config


def new_head(
    config: HeadConfig, target: FrozenTarget, draft_ids: torch.Tensor, seed: int
) -> DecoderHead | MedusaHeads:
    """Random weights, but output norm and own output rows start as the target's.

    The norm starts at 0.4 of it: with the target's own scale a head that knows nothing yet is as sure as
    the target, and spends its first hundred steps on unlearning that (measured: README.md).
    """
    torch.manual_seed(seed)
    head = MedusaHeads(config) if config.kind is HeadKind.MEDUSA else DecoderHead(config)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("lm_head.weight"):
                parameter.copy_(target.lm_head[draft_ids])
        if isinstance(head, DecoderHead) and head.norm is not None:
            head.norm.weight.copy_(target.final_norm * _NEW_NORM_SCALE)
    return head


def count_parameters(module: nn.Module) -> int:
    """Trained numbers."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
