"""The protocol between models and attention kernels: plan once per forward pass, run once per layer."""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_worker.forward_batch import AttentionMetadata


class AttentionBackend(Protocol):
    """Attention of mixed prefill, decode, verify and tree rows over paged KV (terms as in FlashInfer)."""

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepares what every layer of the coming forward pass shares (indices, masks)."""
        ...

    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of one layer under the planned metadata.

        query [T, Hq, D]; keys and values [num_pages * page_size, Hkv, D], this step's rows already written.
        Hq is a multiple of Hkv (grouped queries). Returns [T, Hq, D] in query's dtype.
        """
        ...
