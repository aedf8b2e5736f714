"""The two interfaces around a model: what the model runner and drafters call, and where weights come from."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.kv_pool import PagedPool
from gpu_worker.layers.linear import Precision
from gpu_worker.models.config import ModelConfig


class OutputHead(Protocol):
    """Rows of an output head: all of a vocabulary or a part of it. Columns are positions in that part."""

    num_columns: int

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """normed [M, h] -> [M, num_columns] float32."""
        ...

    def argmax(self, normed: torch.Tensor) -> torch.Tensor:
        """normed [M, h] -> [M] int64, the best column; the lowest of equals."""
        ...

    def topk(self, normed: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(columns [M, k] int64, their logits [M, k], log-sum-exp of all logits [M]), best first; k is at most 64."""
        ...


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

    def forward_capturing(
        self, batch: ForwardBatch, pool: Any, attention: AttentionBackend, layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`forward`, and the residual stream behind each of `layers` (0-based), for heads that draft from it.

        Returns hidden [T, h] and captured [T, len(layers) * h], the layers side by side in the order given; None for
        no layers. The last layer's is what the final norm reads.
        """
        ...

    def output_head(self, token_ids: torch.Tensor | None = None) -> OutputHead:
        """The output head, or only its rows of token_ids [n] int64: a draft vocabulary. Shares weights if whole."""
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


EMBEDDING = "model.embed_tokens.weight"


class TensorSource(Protocol):
    """A checkpoint's tensors under the hub's names, whatever the file format."""

    def has(self, name: str) -> bool: ...

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor on the CPU in a float dtype. May be called from several threads.

        Raises ModelError when it is missing (naming it) or not of `shape` (naming both shapes).
        """
        ...
