"""What to train for each kind, and how it is written in the end: the one place where heads and draft models differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gpu_worker.models.heads.config import HeadKind
from gpu_worker.training.dataset import FeatureDataset
from gpu_worker.training.draft_model import export_draft_model, new_draft_model
from gpu_worker.training.export import export_head, model_card
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.hit_rates import HitRates
from gpu_worker.training.modules.decoder_head import DecoderHead
from gpu_worker.training.modules.draft_model import DraftModel
from gpu_worker.training.modules.medusa import MedusaHeads
from gpu_worker.training.new_head import HeadChoices, head_config, new_head
from gpu_worker.training.objective import Objective
from gpu_worker.training.starting_draft_model import StartingDraftModel
from gpu_worker.training.starting_head import StartingHead
from gpu_worker.training.training_log import Measures

DRAFT_MODEL = "draft-model"
KINDS = (*(kind.value for kind in HeadKind), DRAFT_MODEL)


@dataclass(frozen=True)
class Recipe:
    """A module that is ready to train."""

    module: DecoderHead | MedusaHeads | DraftModel
    target: FrozenTarget
    facts: dict[str, Any]  # that a checkpoint must share
    validation_steps: int
    # (directory, measures, hit rates, facts of the card) -> bytes
    export: Callable[[Path, Measures, HitRates, dict[str, Any]], int]


def reads(kind: str) -> dict[str, bool]:
    """Which features a kind needs: keyword arguments of FeatureDataset."""
    captured = kind == HeadKind.EAGLE3.value
    return {"hidden": not captured and kind != DRAFT_MODEL, "captured": captured}


def recipe(
    kind: str,
    choices: HeadChoices | None,
    num_layers: int,
    target: FrozenTarget,
    dataset: FeatureDataset,
    draft_ids: torch.Tensor,
    objective: Objective,
    seed: int,
    start: StartingHead | StartingDraftModel | None = None,
) -> Recipe:
    """choices: of a head; None for a draft model of num_layers layers (0: one).

    start: what to go on from, whose form counts and not the choices; num_layers may add to a head's layers.
    """
    if choices is None:
        assert not isinstance(start, StartingHead), "of the kind that is trained"
        model = new_draft_model(target, num_layers or 1) if start is None else start.module
        facts = {"kind": kind, "layers": len(model.layers), "objective": asdict(objective)}

        def write_model(directory: Path, measures: Measures, _: HitRates, told: dict[str, Any]) -> int:
            return export_draft_model(
                directory, model, target, draft_ids, model_card("Draft model", kind, measures, told)
            )

        return Recipe(model, target, facts, 5, write_model)
    assert not isinstance(start, StartingDraftModel), "of the kind that is trained"
    if start is None:
        config = head_config(choices, target, dataset.meta.feature_layers)
    else:
        start = start.as_kind(kind, lambda: dataset.input_sizes(target.embedding))
        config = start.training_config(len(draft_ids), num_layers)
    head = new_head(config, target, draft_ids, seed)
    if isinstance(head, DecoderHead) and config.feature_layers:
        head.set_feature_sizes(dataset.feature_sizes())
    if start is not None:
        start.copy_into(head, draft_ids, target)

    def write_head(directory: Path, measures: Measures, rates: HitRates, told: dict[str, Any]) -> int:
        title = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "mtp": "MTP", "medusa": "Medusa"}[kind]
        return export_head(
            directory,
            head,
            replace(config, hit_rates=rates),
            draft_ids,
            model_card(f"{title} head", kind, measures, told),
        )

    steps = config.num_medusa_heads if config.kind is HeadKind.MEDUSA else 5
    facts = {"head": config.to_json(), "objective": asdict(objective)}
    return Recipe(head, target, facts, steps, write_head)
