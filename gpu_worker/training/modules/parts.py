"""Linear layers, norms and the MLP: float32 parameters that compute in whatever dtype their input has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Projection(nn.Linear):
    """x W^T + b in the dtype of x. Gradients add up in float32, however often the weight is used in one step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Norm(nn.Module):
    """RMSNorm; see gpu_worker/layers/norm.py."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._shape, self._eps = (size,), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self.weight.to(x.dtype), self._eps)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Projection(hidden_size, intermediate_size, bias=False)
        self.up_proj = Projection(hidden_size, intermediate_size, bias=False)
        self.down_proj = Projection(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
