"""Draft heads for tiny targets: random ones of every kind, and EAGLE heads that start from the target's own layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from gpu_worker.models.base import CausalLM
from gpu_worker.models.heads.base import DraftHead
from gpu_worker.models.heads.build import build_head
from gpu_worker.models.heads.config import HeadConfig, HeadKind, decoder_head_config
from gpu_worker.models.heads.medusa import MedusaHeads, build_medusa
from gpu_worker.models.heads.tensors import DRAFT_IDS, tensor_shapes
from gpu_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.models import EMBEDDING_STD

# name -> configuration for a target; every convention appears in one of them
KINDS = ("eagle", "eagle-full", "eagle3", "eagle3-normed", "mtp", "mtp-published")
# two layers over some of the ids, which recycle what the output head reads: the form of the heads that ship
SHIPPED_KINDS = ("eagle-shipped", "mtp-shipped")
SKILLED = ("eagle-full", *SHIPPED_KINDS)


def head_config(kind: str, target: CausalLM) -> HeadConfig:
    """The configuration that KINDS or SHIPPED_KINDS names, for `target`."""
    config = target.config
    if kind in SHIPPED_KINDS:
        family = HeadKind(kind.removesuffix("-shipped"))
        head = decoder_head_config(family, config, num_layers=2, draft_vocab_size=120)
        return dataclasses.replace(head, recycles_normed=True)
    if kind.startswith("eagle3"):
        layers = (0, target.num_layers - 1, 0)  # the last layer included
        head = decoder_head_config(HeadKind.EAGLE3, config, draft_vocab_size=120, feature_layers=layers)
        if kind == "eagle3":
            return head
        return dataclasses.replace(head, residual_is_normed=True, own_lm_head=True, num_layers=2)
    if kind.startswith("mtp"):
        head = decoder_head_config(HeadKind.MTP, config)
        if kind == "mtp":
            return head
        return dataclasses.replace(
            head,
            attends_first_slot=False,
            embedding_first=False,
            recycles_normed=False,
            target_hidden="residual",
        )
    head = decoder_head_config(HeadKind.EAGLE, config, full_norms=kind == "eagle-full")
    return dataclasses.replace(head, combine_bias=kind == "eagle")


def tiny_medusa(
    target: CausalLM, num_layers: int = 1, *, own_lm_head: bool = False, num_draft_ids: int = 100
) -> MedusaHeads:
    """Three random heads over a reduced draft vocabulary, or over all ids with output heads of their own."""
    vocab_size = target.config.vocab_size
    config = HeadConfig(
        HeadKind.MEDUSA,
        target.config.hidden_size,
        vocab_size,
        vocab_size if own_lm_head else num_draft_ids,
        own_lm_head=own_lm_head,
        num_medusa_heads=3,
        num_medusa_layers=num_layers,
    )
    return build_medusa(config, random_tensors(config), target)


def random_tensors(config: HeadConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the configuration; outputs are about as large as inputs, also where no norm is between."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        if name == DRAFT_IDS:
            tensors[name] = torch.randperm(config.vocab_size, generator=generator)[: shape[0]].sort().values
        elif "norm" in name:
            tensors[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * (0.5 * shape[-1] ** -0.5)
    return tensors


def tensors_like_target(config: HeadConfig, directory: Path, share: float = 0.002) -> dict[str, torch.Tensor]:
    """A head of EAGLE's full form or MTP that is nearly the target's first layers: it drafts with success.

    `share` of the target's hidden state is mixed in, so that drafts still depend on it.
    """
    checkpoint = SafetensorsCheckpoint(directory)
    tensors: dict[str, torch.Tensor] = {}
    eye = torch.eye(config.hidden_size)
    for name, shape in tensor_shapes(config).items():
        if name == DRAFT_IDS:
            tensors[name] = random_tensors(config)[name]
        elif name == "combine.weight":
            tensors[name] = torch.cat([eye, share * eye], dim=1)
        elif name == "embedding_norm.weight":  # embeddings keep about the size they have
            tensors[name] = torch.full(shape, EMBEDDING_STD)
        elif name == "feature_norm.weight":
            tensors[name] = torch.ones(shape)
        else:
            tensors[name] = checkpoint.read(f"model.{name}", shape).float()
    return tensors


def tiny_head(kind: str, target: CausalLM, directory: Path | None = None, seed: int = 0) -> DraftHead:
    """A head of one of KINDS or SHIPPED_KINDS; with the target's `directory` those of SKILLED draft with success."""
    config = head_config(kind, target)
    if kind in SKILLED and directory is not None:
        return build_head(config, tensors_like_target(config, directory), target)
    return build_head(config, random_tensors(config, seed), target)


def skilled_mtp_head(target: CausalLM, directory: Path) -> DraftHead:
    """An MTP head that drafts with success for the target in `directory`."""
    config = head_config("mtp", target)
    return build_head(config, tensors_like_target(config, directory), target)
