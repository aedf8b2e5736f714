"""The output head of models in torch: logits, the best column, the best few."""

from __future__ import annotations

import torch

from gpu_worker.layers.linear import AnyLinear


class TorchOutputHead:
    """Implements models.base.OutputHead over a linear [columns, h]."""

    def __init__(self, linear: AnyLinear) -> None:
        self.num_columns = linear.out_features
        self._linear = linear

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """See OutputHead.logits."""
        return self._linear(normed).float()

    def argmax(self, normed: torch.Tensor) -> torch.Tensor:
        """See OutputHead.argmax."""
        return self.logits(normed).argmax(dim=-1)

    def topk(self, normed: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See OutputHead.topk."""
        logits = self.logits(normed)
        values, columns = logits.topk(k, dim=-1)
        return columns, values, logits.logsumexp(dim=-1)
