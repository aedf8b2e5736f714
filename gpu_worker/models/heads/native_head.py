"""Decoder heads on the CPU kernels: packed weights, one call per draft step, one call for a whole chain or tree."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.kernels.decoder import DecoderLayerWeights, DecoderShape
from gpu_worker.kernels.draft_head import DraftHeadWeights
from gpu_worker.kernels.draft_head import NativeDraftHead as HeadKernels
from gpu_worker.kernels.draft_trees import GrownTrees, TreeStart
from gpu_worker.kernels.kv_pool import NativeKVPool
from gpu_worker.kernels.linear import PackedLinear, WeightFormat
from gpu_worker.models.heads.base import HeadRows
from gpu_worker.models.heads.config import HeadConfig
from gpu_worker.models.heads.packing import pack_linear
from gpu_worker.models.heads.tensors import DRAFT_IDS
from gpu_worker.models.native import FLOAT_FORMATS, NativeCausalLM, NativeOutputHead, rotary_tables

_INTERLEAVED_BLOCK = 16


class NativeDraftHead:
    """Implements DraftHead beside a target on the kernels; embedding and, unless it has its own, lm_head are its."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(
        self, config: HeadConfig, tensors: Mapping[str, torch.Tensor], target: NativeCausalLM
    ) -> None:
        """tensors: those of tensor_shapes(config)."""
        self.config = config
        self._team = target.team
        self._shape = DecoderShape(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
            target.activation_group,
        )
        packer = _Packer(tensors, target, self._shape)
        weights = DraftHeadWeights(
            layers=[packer.layer(i, config) for i in range(config.num_layers)],
            fuse=packer.linear(["fuse"]) if config.feature_layers else None,
            combine=packer.linear(["combine"]) if config.combines else None,
            embedding_norm=packer.norm("embedding_norm"),
            feature_norm=packer.norm("feature_norm"),
            embedding_first=config.embedding_first,
            residual_is_normed=config.residual_is_normed,
            final_norm=packer.norm("norm"),
            recycles_normed=config.recycles_normed,
        )
        self.token_ids = tensors.get(DRAFT_IDS)
        if config.own_lm_head:
            lm_head = packer.linear(["lm_head"])
            self.output = NativeOutputHead(lm_head, target.team, target.activation_group)
        else:
            self.output = target.output_head(self.token_ids)
        self._kernels = target.kernels
        rotary = rotary_tables(config.rope, config.head_dim, config.max_position_embeddings)
        self._head = HeadKernels(target.kernels, self._shape, target.embedding, *rotary, weights)

    def new_pool(self, num_pages: int, page_size: int) -> NativeKVPool:
        """See DraftHead.new_pool."""
        return self._head.new_pool(num_pages, page_size)

    def bytes_per_page(self, page_size: int) -> int:
        """See DraftHead.bytes_per_page."""
        shape = self._shape
        return NativeKVPool.bytes_per_page(
            self.config.num_layers, page_size, shape.num_kv_heads, shape.head_dim
        )

    def forward(
        self,
        batch: ForwardBatch,
        features: torch.Tensor,
        pool: NativeKVPool,
        attention: AttentionBackend | None = None,
        *,
        recycled: bool,
    ) -> HeadRows:
        """See DraftHead.forward; float32. A row's bits do not depend on the other rows."""
        return HeadRows(*self._head.forward(batch, pool, self._team, features.contiguous(), recycled))

    def tree(self, start: TreeStart, pool: NativeKVPool) -> GrownTrees:
        """Chains or trees of D sequences: greedy ones are, bit for bit, `forward` and topk level by level."""
        return self._head.tree(start, pool, self._team, self.output.linear, self.token_ids)


class _Packer:
    """Turns a checkpoint's float tensors into what the kernels take, in the target's precision."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], target: NativeCausalLM, shape: DecoderShape
    ) -> None:
        self._tensors = tensors
        self._kernels = target.kernels
        self._format: WeightFormat = FLOAT_FORMATS[target.precision]
        self._shape = shape

    def linear(self, names: list[str]) -> PackedLinear:
        """One linear whose columns are the rows of `names` in order."""
        return pack_linear(self._kernels, self._format, self._tensors, names)

    def norm(self, name: str) -> torch.Tensor | None:
        """A norm's weight as float32; None where the head has none."""
        weight = self._tensors.get(f"{name}.weight")
        return None if weight is None else weight.to(torch.float32).contiguous()

    def layer(self, index: int, config: HeadConfig) -> DecoderLayerWeights:
        """Layer `index` with q, k, v joined, and gate and up in blocks of 16 in turn."""
        prefix = f"layers.{index}."
        mlp_norm = self.norm(f"{prefix}post_attention_layernorm")
        assert mlp_norm is not None, "every layer has one"
        gate_up = PackedLinear(self._kernels, self._format, self._shape.interleaved_width, config.hidden_size)
        for i, name in enumerate(("gate", "up")):
            gate_up.pack_floats(
                self._tensors[f"{prefix}mlp.{name}_proj.weight"], i * _INTERLEAVED_BLOCK, block_stride=2
            )
        return DecoderLayerWeights(
            qkv=self.linear([f"{prefix}self_attn.{name}_proj" for name in "qkv"]),
            o=self.linear([f"{prefix}self_attn.o_proj"]),
            gate_up=gate_up,
            down=self.linear([f"{prefix}mlp.down_proj"]),
            attn_norm=self.norm(f"{prefix}input_layernorm"),
            mlp_norm=mlp_norm,
        )
