"""A head that `fit` goes on from: its weights, its form, and a draft vocabulary that keeps its ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_worker.config import LayerIdsName
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.heads.config import HeadConfig, HeadKind
from gpu_worker.models.heads.tensors import DRAFT_IDS
from gpu_worker.training.eagle_from_mtp import InputSizes, eagle_from_mtp
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.modules.decoder_head import DecoderHead
from gpu_worker.training.modules.medusa import MedusaHeads
from gpu_worker.weights.head_checkpoint import load_head


@dataclass(frozen=True)
class StartingHead:
    """Any layout that the service loads; a head of the same kind for the same target, or an MTP head for EAGLE."""

    config: HeadConfig
    tensors: dict[str, torch.Tensor]

    @classmethod
    def load(
        cls,
        spec: str,
        kind: str,
        target: ModelConfig,
        feature_layers: tuple[int, ...],
        layer_ids_name: LayerIdsName = "inputs",
    ) -> StartingHead:
        """spec: a directory, file or hub id; feature_layers: those that were extracted.

        Raises ModelError for what is no head of this target, TrainingError for one that the features do not suit.
        """
        checkpoint = load_head(spec, target, layer_ids_name)
        config = checkpoint.config
        becomes_eagle = config.kind is HeadKind.MTP and kind == HeadKind.EAGLE.value
        if config.kind != kind and not becomes_eagle:
            raise TrainingError(f"{spec}: kind is {config.kind.value}, the one to train is {kind}")
        if config.feature_layers and config.feature_layers != feature_layers:
            raise TrainingError(
                f"{spec}: feature_layers are {list(config.feature_layers)},"
                f" the features were extracted from {list(feature_layers)}"
            )
        if config.target_hidden != "normed":
            raise TrainingError(
                f"{spec}: target_hidden is {config.target_hidden!r}, features are extracted behind the final norm"
            )
        return cls(config, checkpoint.tensors)

    def as_kind(self, kind: str, sizes: Callable[[], InputSizes]) -> StartingHead:
        """The head as one of `kind`, which `load` was asked for; `sizes` measures what it reads, if that matters."""
        if self.config.kind == kind:
            return self
        return StartingHead(*eagle_from_mtp(self.config, self.tensors, sizes()))

    def training_config(self, draft_vocab_size: int, num_layers: int = 0) -> HeadConfig:
        """The head's own form, with that many draft ids, nothing measured yet, and slot 0 as training has it.

        num_layers: 0 or the head's own, or more. Raises TrainingError for fewer.
        """
        own = self.config.num_layers
        if num_layers and num_layers < own:
            raise TrainingError(f"layers: {num_layers}, the head to start from has {own}")
        return dataclasses.replace(
            self.config,
            num_layers=num_layers or own,
            draft_vocab_size=draft_vocab_size,
            hit_rates=(),
            attends_first_slot=True,
        )

    @property
    def ids(self) -> torch.Tensor:
        """[V] int64: the target ids that its draft ids stand for."""
        return self.tensors.get(DRAFT_IDS, torch.arange(self.config.vocab_size))

    def copy_into(
        self, head: DecoderHead | MedusaHeads, draft_ids: torch.Tensor, target: FrozenTarget
    ) -> None:
        """Gives `head`, of training_config's form, these weights; output rows of ids that are new are the target's.

        Layers that this head lacks keep their random weights but add nothing to the residual stream yet.
        """
        tensors = {name: tensor.float() for name, tensor in self.tensors.items() if name != DRAFT_IDS}
        for name in [name for name in tensors if name.endswith("lm_head.weight")]:
            rows = target.lm_head[: self.config.vocab_size].clone()
            rows[self.ids] = tensors[name]
            tensors[name] = rows[draft_ids]
        added = tuple(f"layers.{i}." for i in range(self.config.num_layers, head.config.num_layers))
        for name, tensor in head.tensors().items():
            if name.startswith(added):
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                tensors[name] = torch.zeros_like(tensor) if adds else tensor
        head.load_tensors(tensors)
