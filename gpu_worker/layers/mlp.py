"""The gated feed-forward half of a decoder layer (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu_worker.layers.linear import AnyLinear


class GatedMLP:
    """down(silu(gate(x)) * up(x)); gate and up are one matrix product."""

    def __init__(self, gate_up_proj: AnyLinear, down_proj: AnyLinear) -> None:
        """gate_up_proj: [2 * intermediate, h], the gate's rows first; down_proj: [h, intermediate]."""
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self._intermediate = gate_up_proj.out_features // 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, h] -> [T, h]."""
        gate_up = self.gate_up_proj(x)
        gated = F.silu(gate_up[:, : self._intermediate])
        return self.down_proj(gated.mul_(gate_up[:, self._intermediate :]))
