"""The attention half of a decoder layer: projections, rotation, write into paged KV, attention."""

from __future__ import annotations

import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.kv_pool import KVPool
from gpu_worker.layers.linear import AnyLinear
from gpu_worker.layers.norm import RMSNorm
from gpu_worker.layers.rotary import rotate


class Attention:
    """Grouped-query self-attention of one layer over paged KV."""

    def __init__(
        self,
        layer: int,
        qkv_proj: AnyLinear,
        o_proj: AnyLinear,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        """qkv_proj: [(Hq + 2 * Hkv) * D, h], rows of q, k, v in this order; q_norm, k_norm act per head."""
        self.layer = layer
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.q_norm = q_norm
        self.k_norm = k_norm
        self._num_heads = num_heads
        self._num_qk_heads = num_heads + num_kv_heads
        self._head_dim = head_dim
        self._scale = head_dim**-0.5

    def __call__(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        batch: ForwardBatch,
        pool: KVPool,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """x [T, h] -> [T, h]; writes this layer's KV of the T rows. cos, signed_sin: RotaryEmbedding.at."""
        num_rows, num_heads = x.shape[0], self._num_heads
        qkv = self.qkv_proj(x).view(num_rows, -1, self._head_dim)  # [T, Hq + 2 Hkv, D]
        qk = qkv[:, : self._num_qk_heads]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :num_heads]), self.k_norm(qk[:, num_heads:])), dim=1)
        qk = rotate(qk, cos, signed_sin)  # queries and keys in one go
        pool.write(self.layer, batch.out_slots, qk[:, num_heads:], qkv[:, self._num_qk_heads :])
        out = attention.run(qk[:, :num_heads], pool.keys[self.layer], pool.values[self.layer], self._scale)
        return self.o_proj(out.reshape(num_rows, -1))
