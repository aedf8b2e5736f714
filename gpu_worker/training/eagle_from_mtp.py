"""Beside starting_head.py: an MTP head as an EAGLE head, which lacks the norms on both inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from gpu_worker.models.heads.config import HeadConfig, HeadKind

_EMBEDDING, _FEATURE, _COMBINE = "embedding_norm.weight", "feature_norm.weight", "combine.weight"


@dataclass(frozen=True)
class InputSizes:
    """Root mean squares of what a head's two inputs are on average, a token's embedding and a hidden state."""

    embedding: float
    hidden: float


def eagle_from_mtp(
    config: HeadConfig, tensors: dict[str, torch.Tensor], sizes: InputSizes
) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """The MTP head `config` with its `tensors` (tensor_shapes' names), as an EAGLE head that computes nearly the same.

    A norm divides by the size of its input and multiplies by its weights. Both go into the columns of `combine`, the
    size as it is on average: what is lost is that tokens differ in it, which a little training mends.
    """
    assert config.kind is HeadKind.MTP, "EAGLE's heads have the form of MTP's but for these norms"
    embedding = tensors[_EMBEDDING].float() / sizes.embedding
    hidden = tensors[_FEATURE].float() / sizes.hidden
    columns = torch.cat((embedding, hidden) if config.embedding_first else (hidden, embedding))
    folded = {name: tensor for name, tensor in tensors.items() if name not in (_EMBEDDING, _FEATURE)}
    folded[_COMBINE] = tensors[_COMBINE].float() * columns
    return dataclasses.replace(config, kind=HeadKind.EAGLE), folded
