"""The two interfaces around a model: what the model runner and drafters call, and where weights come from."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.kv_pool import PagedPool
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

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values in its pool."""
        ...

    def new_pool(self, num_pages: int, page_size: int) -> PagedPool:
        """KV memory in the form that `forward` takes (KVPool, or the CPU kernels' own). Raises DeviceError."""
        ...

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes that one page of its pool takes over all layers."""
        ...

    def forward(self, batch: ForwardBatch, pool: Any, attention: AttentionBackend) -> torch.Tensor:
        """Runs every layer over the batch's rows and writes each row's KV; `pool` comes from new_pool.

        A model in torch plans `attention` for the batch and runs it per layer; one with kernels of its own has no
        use for it. Returns hidden [T, h], after the final norm.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [M, h] -> [M, config.vocab_size] float32. Ids that no token has are not among them."""
        ...

    def compute_argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [M, h] -> [M] int64: the best id of each row, what compute_logits(hidden).argmax(-1) gives."""
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
