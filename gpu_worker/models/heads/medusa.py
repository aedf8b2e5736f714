"""Medusa's heads (Cai et al., arXiv 2401.10774, section 2.1.1): residual blocks over the target's last hidden state.

Head k predicts the token k + 1 places behind the one that the target itself draws next. There is no KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from gpu_worker.kernels.linear import PackedLinear
from gpu_worker.kernels.medusa import medusa_candidates, residual_blocks
from gpu_worker.layers.linear import AnyLinear, make_linear
from gpu_worker.layers.output_head import TorchOutputHead
from gpu_worker.models.base import CausalLM, OutputHead
from gpu_worker.models.heads.config import HeadConfig
from gpu_worker.models.heads.packing import pack_linear
from gpu_worker.models.heads.tensors import DRAFT_IDS
from gpu_worker.models.llama.model import LlamaForCausalLM
from gpu_worker.models.native import FLOAT_FORMATS, NativeCausalLM, NativeOutputHead

# By row, head and rank: target ids and their log-probabilities.
Candidates = tuple[list[list[list[int]]], list[list[list[float]]]]


class MedusaHeads(Protocol):
    """All heads of a Medusa checkpoint beside their target."""

    config: HeadConfig
    outputs: list[OutputHead]  # of each head; one and the same where they share the target's
    token_ids: torch.Tensor | None  # [draft_vocab_size] int64 target id of each column; None: its own number
    dtype: torch.dtype  # of what they read and give
    device: torch.device

    def forward(self, normed: torch.Tensor, num_heads: int) -> torch.Tensor:
        """The target's hidden states [M, h] -> what the outputs of the first num_heads read, [M, num_heads, h]."""
        ...

    def candidates(self, normed: torch.Tensor, num_heads: int, count: int) -> Candidates | None:
        """For each row of `normed` and each of the first num_heads heads, the likeliest `count` draft ids, best first.

        None where that is not one call of the kernels.
        """
        ...


class TorchMedusaHeads:
    """Implements MedusaHeads in torch."""

    def __init__(
        self, config: HeadConfig, tensors: Mapping[str, torch.Tensor], target: LlamaForCausalLM
    ) -> None:
        """tensors: those of tensor_shapes(config), on the CPU."""
        self.config = config
        self.dtype, self.device = target.dtype, target.device

        def linear(name: str) -> AnyLinear:
            bias = tensors.get(f"{name}.bias")
            return make_linear(tensors[f"{name}.weight"], bias, target.precision, target.device)

        heads = range(config.num_medusa_heads)
        self._blocks = [
            [linear(f"medusa.{k}.blocks.{i}") for i in range(config.num_medusa_layers)] for k in heads
        ]
        ids = tensors.get(DRAFT_IDS)
        self.token_ids = None if ids is None else ids.to(target.device)
        if config.own_lm_head:
            self.outputs: list[OutputHead] = [TorchOutputHead(linear(f"medusa.{k}.lm_head")) for k in heads]
        else:
            self.outputs = [target.output_head(ids)] * config.num_medusa_heads

    @torch.inference_mode()
    def forward(self, normed: torch.Tensor, num_heads: int) -> torch.Tensor:
        """See MedusaHeads.forward."""
        states = []
        for blocks in self._blocks[:num_heads]:
            x = normed
            for block in blocks:
                x = x + F.silu(block(x))
            states.append(x)
        return torch.stack(states, dim=1)

    def candidates(self, normed: torch.Tensor, num_heads: int, count: int) -> Candidates | None:
        """See MedusaHeads.candidates."""
        return None


class NativeMedusaHeads:
    """Implements MedusaHeads on the CPU kernels: every head's blocks of one depth in one call."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(
        self, config: HeadConfig, tensors: Mapping[str, torch.Tensor], target: NativeCausalLM
    ) -> None:
        """tensors: those of tensor_shapes(config)."""
        self.config = config
        self._team = target.team
        self._group = target.activation_group
        self._kernels = target.kernels
        self._format = FLOAT_FORMATS[target.precision]
        heads = range(config.num_medusa_heads)
        # The first blocks read the same rows and are one linear; later ones read each head's own. A chain of one draft
        # needs but the first head, which therefore is there once more.
        self._first = self._packed([f"medusa.{k}.blocks.0" for k in heads], tensors)
        self._first_alone = self._packed(["medusa.0.blocks.0"], tensors)
        self._later = [
            [self._packed([f"medusa.{k}.blocks.{i}"], tensors) for i in range(1, config.num_medusa_layers)]
            for k in heads
        ]
        self.token_ids = tensors.get(DRAFT_IDS)
        self._shared = None if config.own_lm_head else target.output_head(self.token_ids)
        self.outputs: list[OutputHead]
        if self._shared is None:
            self.outputs = [
                NativeOutputHead(self._packed([f"medusa.{k}.lm_head"], tensors), self._team, self._group)
                for k in heads
            ]
        else:
            self.outputs = [self._shared] * config.num_medusa_heads

    def forward(self, normed: torch.Tensor, num_heads: int) -> torch.Tensor:
        """See MedusaHeads.forward. A row's bits do not depend on the other rows."""
        first = self._first_blocks(num_heads)
        states = residual_blocks(first, self._team, normed.contiguous(), self._group)[:, :num_heads]
        for k, blocks in enumerate(self._later[:num_heads]):
            for block in blocks:
                x = states[:, k].contiguous()
                states[:, k] = residual_blocks(block, self._team, x, self._group)[:, 0]
        return states

    def candidates(self, normed: torch.Tensor, num_heads: int, count: int) -> Candidates | None:
        """See MedusaHeads.candidates."""
        if self._shared is None or any(self._later):
            return None
        ids, values = medusa_candidates(
            self._first_blocks(num_heads),
            self._shared.linear,
            self._team,
            normed.contiguous(),
            num_heads,
            min(count, self._shared.num_columns),
            self.token_ids,
            self._group,
        )
        return ids.tolist(), values.tolist()

    def _first_blocks(self, num_heads: int) -> PackedLinear:
        """Those of at least the first num_heads heads."""
        return self._first_alone if num_heads == 1 else self._first

    def _packed(self, names: list[str], tensors: Mapping[str, torch.Tensor]) -> PackedLinear:
        return pack_linear(self._kernels, self._format, tensors, names)


def build_medusa(config: HeadConfig, tensors: Mapping[str, torch.Tensor], target: CausalLM) -> MedusaHeads:
    """Medusa's heads in their target's precision and on its device."""
    if isinstance(target, NativeCausalLM):
        return NativeMedusaHeads(config, tensors, target)
    assert isinstance(target, LlamaForCausalLM), "the two implementations of CausalLM"
    return TorchMedusaHeads(config, tensors, target)
