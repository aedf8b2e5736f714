"""Medusa heads as a module: residual blocks on the target's last hidden state, one stack per position ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from gpu_worker.models.heads.config import HeadConfig
from gpu_worker.training.batches import TrainingBatch
from gpu_worker.training.modules.decoder_head import DraftStep
from gpu_worker.training.modules.parts import Projection


class MedusaStack(nn.Module):
    """x + silu(W x + b), once per block (arXiv 2401.10774, section 2.1.1)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        h = config.hidden_size
        blocks = [Projection(h, h) for _ in range(config.num_medusa_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.lm_head = Projection(h, config.draft_vocab_size, bias=False) if config.own_lm_head else None
        for block in blocks:
            nn.init.zeros_(block.weight)  # starts as the target's own next-token law
            nn.init.zeros_(block.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        return x


class MedusaHeads(nn.Module):
    """Parameters bear the canonical names of models/heads/tensors.py."""

    lookahead = 1  # the target itself gives the next token; head k drafts the one k + 1 behind it

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.medusa = nn.ModuleList(MedusaStack(config) for _ in range(config.num_medusa_heads))

    def tensors(self) -> dict[str, torch.Tensor]:
        """What serving reads, under the canonical names."""
        return dict(self.state_dict())

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """The reverse of `tensors`."""
        self.load_state_dict(tensors)

    def output_rows(self, step: int) -> torch.Tensor | None:
        """Head `step`'s own output rows [V, h]; None: the target's."""
        lm_head = cast(MedusaStack, self.medusa[step]).lm_head
        return None if lm_head is None else lm_head.weight

    def unroll(self, batch: TrainingBatch, embedding: torch.Tensor, steps: int) -> Iterator[DraftStep]:
        """What each of the first `steps` heads makes of every law row's hidden state."""
        assert batch.hidden is not None, "read with the last hidden state"
        for stack in self.medusa[:steps]:
            yield DraftStep(stack(batch.hidden), None)
