"""Root-mean-square normalisation before every projection and before the output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, section 3).

    The mean of squares is taken in float32 whatever the dtype of x, one row at a time.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight [n] in the activations' dtype."""
        self.weight = weight
        self.eps = eps
        self._shape = (weight.shape[0],)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., n] -> the same shape and dtype."""
        return F.rms_norm(x, self._shape, self.weight, self.eps)
