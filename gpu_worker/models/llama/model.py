"""The forward pass of Llama-shaped decoders: embedding, pre-norm decoder layers, final norm, output head."""

from __future__ import annotations

import dataclasses

import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.errors import ModelError
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.kv_pool import KVPool
from gpu_worker.layers.attention import Attention
from gpu_worker.layers.embedding import Embedding
from gpu_worker.layers.linear import AnyLinear, Precision, select_rows
from gpu_worker.layers.mlp import GatedMLP
from gpu_worker.layers.norm import RMSNorm
from gpu_worker.layers.output_head import TorchOutputHead
from gpu_worker.layers.rotary import RotaryEmbedding
from gpu_worker.models.config import ModelConfig


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, input_norm: RMSNorm, attention: Attention, post_attention_norm: RMSNorm, mlp: GatedMLP
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp

    def __call__(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        batch: ForwardBatch,
        pool: KVPool,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """x [T, h] -> [T, h], the residual stream behind this layer."""
        x = x + self.attention(self.input_norm(x), cos, signed_sin, batch, pool, attention)
        return x + self.mlp(self.post_attention_norm(x))


class LlamaForCausalLM:
    """Implements CausalLM for every architecture of the family; they differ in data (biases, q/k norms)."""

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        embedding: Embedding,
        rotary: RotaryEmbedding,
        layers: list[DecoderLayer],
        final_norm: RMSNorm,
        lm_head: AnyLinear,
    ) -> None:
        """lm_head has exactly config.vocab_size rows: the ids that may be sampled."""
        self.config = config
        self.precision = precision
        self.dtype = final_norm.weight.dtype
        self.device = final_norm.weight.device
        self.embedding = embedding
        self.rotary = rotary
        self.layers = layers
        self.final_norm = final_norm
        self.lm_head = lm_head

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_dtype(self) -> torch.dtype:
        """See CausalLM.kv_dtype."""
        return self.dtype

    def new_pool(self, num_pages: int, page_size: int) -> KVPool:
        """See CausalLM.new_pool."""
        c = self.config
        return KVPool(
            self.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim, self.kv_dtype, self.device
        )

    def bytes_per_page(self, page_size: int) -> int:
        """See CausalLM.bytes_per_page."""
        c = self.config
        return KVPool.bytes_per_page(self.num_layers, page_size, c.num_kv_heads, c.head_dim, self.kv_dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool, attention: AttentionBackend) -> torch.Tensor:
        """See CausalLM.forward."""
        return self.forward_capturing(batch, pool, attention, ())[0]

    @torch.inference_mode()
    def forward_capturing(
        self, batch: ForwardBatch, pool: KVPool, attention: AttentionBackend, layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See CausalLM.forward_capturing."""
        attention.plan(batch.attention)
        cos, signed_sin = self.rotary.at(batch.positions)
        x = self.embedding(batch.input_ids)
        behind: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, signed_sin, batch, pool, attention)
            if index in layers:
                behind[index] = x
        captured = torch.cat([behind[index] for index in layers], dim=1) if layers else None
        return self.final_norm(x), captured

    def output_head(self, token_ids: torch.Tensor | None = None) -> TorchOutputHead:
        """See CausalLM.output_head."""
        if token_ids is None:
            return TorchOutputHead(self.lm_head)
        return TorchOutputHead(select_rows(self.lm_head, token_ids))

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See CausalLM.compute_logits."""
        return self.lm_head(hidden).float()

    def compute_argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """See CausalLM.compute_argmax."""
        return self.compute_logits(hidden).argmax(dim=-1)

    def truncated(self, num_layers: int) -> LlamaForCausalLM:
        """See CausalLM.truncated."""
        if not 1 <= num_layers <= self.num_layers:
            raise ModelError(f"truncated model: {num_layers} layers, must be between 1 and {self.num_layers}")
        return LlamaForCausalLM(
            dataclasses.replace(self.config, num_layers=num_layers),
            self.precision,
            self.embedding,
            self.rotary,
            self.layers[:num_layers],
            self.final_norm,
            self.lm_head,
        )
