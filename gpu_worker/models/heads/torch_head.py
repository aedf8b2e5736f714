"""Decoder heads in torch: the reference of the CPU kernels, and what serves on GPUs and in float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.kv_pool import KVPool
from gpu_worker.layers.attention import Attention
from gpu_worker.layers.linear import AnyLinear, make_linear
from gpu_worker.layers.mlp import GatedMLP
from gpu_worker.layers.norm import RMSNorm
from gpu_worker.layers.output_head import TorchOutputHead
from gpu_worker.layers.rotary import RotaryEmbedding
from gpu_worker.models.heads.base import HeadRows
from gpu_worker.models.heads.config import HeadConfig
from gpu_worker.models.heads.tensors import DRAFT_IDS
from gpu_worker.models.llama.model import LlamaForCausalLM


class _HeadLayer:
    """A decoder layer whose attention may read something else than the (normed) residual stream."""

    def __init__(
        self, input_norm: RMSNorm | None, attention: Attention, post_attention_norm: RMSNorm, mlp: GatedMLP
    ) -> None:
        self._input_norm = input_norm
        self._attention = attention
        self._post_attention_norm = post_attention_norm
        self._mlp = mlp

    def __call__(
        self,
        x: torch.Tensor,
        side: torch.Tensor | None,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        batch: ForwardBatch,
        pool: KVPool,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """x [T, h] the residual stream, side [T, 2h] or None -> [T, h]."""
        if side is None:
            side = x if self._input_norm is None else self._input_norm(x)
        x = x + self._attention(side, cos, signed_sin, batch, pool, attention)
        return x + self._mlp(self._post_attention_norm(x))


class TorchDraftHead:
    """Implements DraftHead beside a target in torch; embedding and, unless it has its own, lm_head are the target's."""

    def __init__(
        self, config: HeadConfig, tensors: Mapping[str, torch.Tensor], target: LlamaForCausalLM
    ) -> None:
        """tensors: those of tensor_shapes(config), on the CPU."""
        self.config = config
        self.dtype, self.device = target.dtype, target.device
        self._tensors = tensors
        self._precision = target.precision
        self._embedding = target.embedding
        self._rotary = RotaryEmbedding(
            config.rope, config.head_dim, config.max_position_embeddings, self.dtype, self.device
        )
        self._fuse = self._linear("fuse") if config.feature_layers else None
        self._combine = self._linear("combine") if config.combines else None
        self._embedding_norm = self._norm("embedding_norm")
        self._feature_norm = self._norm("feature_norm")
        self._layers = [self._layer(i) for i in range(config.num_layers)]
        self._final_norm = self._norm("norm")
        ids = tensors.get(DRAFT_IDS)
        self.token_ids = None if ids is None else ids.to(self.device)
        if config.own_lm_head:
            self.output = TorchOutputHead(self._linear("lm_head"))
        else:
            self.output = target.output_head(ids)
        del self._tensors

    def new_pool(self, num_pages: int, page_size: int) -> KVPool:
        """See DraftHead.new_pool."""
        c = self.config
        return KVPool(c.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim, self.dtype, self.device)

    def bytes_per_page(self, page_size: int) -> int:
        """See DraftHead.bytes_per_page."""
        c = self.config
        return KVPool.bytes_per_page(c.num_layers, page_size, c.num_kv_heads, c.head_dim, self.dtype)

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        features: torch.Tensor,
        pool: KVPool,
        attention: AttentionBackend,
        *,
        recycled: bool,
    ) -> HeadRows:
        """See DraftHead.forward."""
        attention.plan(batch.attention)
        cos, signed_sin = self._rotary.at(batch.positions)
        embedded = self._embedding(batch.input_ids)
        state = features if recycled or self._fuse is None else self._fuse(features)
        if self._embedding_norm is not None and self._feature_norm is not None:
            embedded, normed_state = self._embedding_norm(embedded), self._feature_norm(state)
        else:
            normed_state = state
        order = (embedded, normed_state) if self.config.embedding_first else (normed_state, embedded)
        pair = torch.cat(order, dim=1)  # [T, 2h]
        side: torch.Tensor | None = None
        if self._combine is not None:
            x = self._combine(pair)
        else:
            side = pair
            x = normed_state if self.config.residual_is_normed else state
        for layer in self._layers:
            x = layer(x, side, cos, signed_sin, batch, pool, attention)
            side = None
        normed = x if self._final_norm is None else self._final_norm(x)
        return HeadRows(normed if self.config.recycles_normed else x, normed)

    def _layer(self, index: int) -> _HeadLayer:
        config, prefix = self.config, f"layers.{index}."
        attention = Attention(
            index,
            self._joined([f"{prefix}self_attn.{name}_proj" for name in "qkv"]),
            self._linear(f"{prefix}self_attn.o_proj"),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        mlp = GatedMLP(
            self._joined([f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"]),
            self._linear(f"{prefix}mlp.down_proj"),
        )
        post_norm = self._norm(f"{prefix}post_attention_layernorm")
        assert post_norm is not None, "every layer has one"
        return _HeadLayer(self._norm(f"{prefix}input_layernorm"), attention, post_norm, mlp)

    def _linear(self, name: str) -> AnyLinear:
        return self._joined([name])

    def _joined(self, names: list[str]) -> AnyLinear:
        """One linear whose rows are those of `names` in order."""
        weight = torch.cat([self._tensors[f"{name}.weight"] for name in names])
        biased = f"{names[0]}.bias" in self._tensors
        bias = torch.cat([self._tensors[f"{name}.bias"] for name in names]) if biased else None
        return make_linear(weight, bias, self._precision, self.device)

    def _norm(self, name: str) -> RMSNorm | None:
        weight = self._tensors.get(f"{name}.weight")
        if weight is None:
            return None
        return RMSNorm(weight.to(self.device, self.dtype), self.config.rms_norm_eps)
