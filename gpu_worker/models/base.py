"""The two interfaces around a model: what the model runner and drafters call, and where weights come from."""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.kv_pool import KVPool
from gpu_worker.layers.linear import Precision
from gpu_worker.models.config import ModelConfig


class CausalLM(Protocol):
    """A decoder whose weights are loaded; stateless, so target and drafts may share it."""

    config: ModelConfig
    precision: Precision
    dtype: torch.dtype  # of hidden states
    device: torch.device

    @property
    def num_layers(self) -> int: ...

    def forward(self, batch: ForwardBatch, pool: KVPool, attention: AttentionBackend) -> torch.Tensor:
        """Plans `attention` for the batch, runs every layer and writes each row's KV.

        Returns hidden [T, h], after the final norm.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [M, h] -> [M, config.vocab_size] float32. Ids that no token has are not among them."""
        ...

    def truncated(self, num_layers: int) -> CausalLM:
        """The same model cut to its first layers, with the final norm and the head; shares all weights.

        Raises ModelError unless 1 <= num_layers <= self.num_layers.
        """
        ...


class TensorSource(Protocol):
    """A checkpoint's tensors under the hub's names, whatever the file format."""

    def has(self, name: str) -> bool: ...

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor on the CPU in a float dtype. May be called from several threads.

        Raises ModelError when it is missing (naming it) or not of `shape` (naming both shapes).
        """
        ...
