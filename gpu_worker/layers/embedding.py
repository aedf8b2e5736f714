"""Token ids to the first hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Embedding:
    """Rows of one table; a tied output head shares the table's memory."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight [rows, h] in the activations' dtype."""
        self.weight = weight

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] int64 -> [T, h]."""
        return F.embedding(input_ids, self.weight)
