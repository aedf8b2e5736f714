"""Llama-shaped decoders on the CPU kernels: built from a checkpoint's tensors, called like any other CausalLM."""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.errors import ModelError
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.kernels.decoder import DecoderLayerWeights, DecoderShape, NativeDecoder
from gpu_worker.kernels.draft_trees import GrownTrees, TreeStart, grow
from gpu_worker.kernels.kv_pool import NativeKVPool
from gpu_worker.kernels.linear import BlockKind, PackedLinear, WeightFormat
from gpu_worker.kernels.native import NativeKernels, ThreadTeam
from gpu_worker.layers.linear import Precision
from gpu_worker.layers.rotary import RopeConfig, inverse_frequencies
from gpu_worker.models.base import EMBEDDING, TensorSource
from gpu_worker.models.config import ModelConfig

# What float tensors become, by precision. Quantised tensors of a GGUF stay as they are under "int8" where a kernel
# knows their type: that is exact, and 4-bit blocks are half the bytes to read.
FLOAT_FORMATS: dict[Precision, WeightFormat] = {"int8": WeightFormat.Q8_0, "bfloat16": WeightFormat.BF16}
NATIVE_PRECISIONS: tuple[Precision, ...] = tuple(FLOAT_FORMATS)
# W8 needs activations in groups of 64; the block formats take 32, which is closer to the float product.
_ACTIVATION_GROUPS = {WeightFormat.W8: 64}
_DEFAULT_GROUP = 32
_BLOCK_FORMATS = {
    "Q4_0": (BlockKind.Q4_0, WeightFormat.Q4_0),
    "Q4_1": (BlockKind.Q4_1, WeightFormat.Q4_1),
    "Q8_0": (BlockKind.Q8_0, WeightFormat.Q8_0),
}
_INTERLEAVED_BLOCK = 16
_MAX_BUILD_THREADS = 4


@runtime_checkable
class BlockSource(Protocol):
    """A TensorSource that also gives quantised tensors as they lie in the file."""

    def read_blocks(self, name: str, shape: tuple[int, ...]) -> tuple[str, torch.Tensor] | None:
        """(type name, [rows, bytes per row] uint8), or None for a tensor that is not quantised."""
        ...


class NativeOutputHead:
    """Implements models.base.OutputHead over a packed linear [columns, h]."""

    def __init__(self, linear: PackedLinear, team: ThreadTeam, activation_group: int) -> None:
        self.linear = linear
        self.num_columns = linear.out_features
        self._team = team
        self._group = activation_group

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """See OutputHead.logits."""
        return self.linear.run(self._team, normed.contiguous(), self._group)

    def argmax(self, normed: torch.Tensor) -> torch.Tensor:
        """See OutputHead.argmax."""
        return self.linear.argmax(self._team, normed.contiguous(), self._group)

    def topk(self, normed: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See OutputHead.topk."""
        return self.linear.topk(self._team, normed.contiguous(), k, self._group)


class NativeCausalLM:
    """Implements CausalLM; its pool is a NativeKVPool and it has no use for an attention backend."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        kernels: NativeKernels,
        team: ThreadTeam,
        shape: DecoderShape,
        embedding: torch.Tensor | PackedLinear,
        rotary: tuple[torch.Tensor, torch.Tensor],
        layers: list[DecoderLayerWeights],
        final_norm: torch.Tensor,
        lm_head: PackedLinear,
    ) -> None:
        """lm_head has exactly config.vocab_size columns; rotary is (cos, sin), each [positions, head_dim / 2]."""
        self.config = config
        self.precision: Precision = precision
        self.kernels = kernels
        self.embedding = embedding
        self.lm_head = lm_head
        self.team = team
        self.activation_group = shape.activation_group
        self._parts = (kernels, shape, embedding, rotary, final_norm)
        self._layers = layers
        self._decoder = NativeDecoder(kernels, shape, embedding, *rotary, layers, final_norm)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def kv_dtype(self) -> torch.dtype:
        """See CausalLM.kv_dtype."""
        return NativeKVPool.dtype

    def new_pool(self, num_pages: int, page_size: int) -> NativeKVPool:
        """See CausalLM.new_pool."""
        kernels, shape = self._parts[:2]
        return NativeKVPool(
            kernels, self.num_layers, num_pages, page_size, shape.num_kv_heads, shape.head_dim
        )

    def bytes_per_page(self, page_size: int) -> int:
        """See CausalLM.bytes_per_page."""
        shape = self._parts[1]
        return NativeKVPool.bytes_per_page(self.num_layers, page_size, shape.num_kv_heads, shape.head_dim)

    def forward(
        self, batch: ForwardBatch, pool: NativeKVPool, attention: AttentionBackend | None = None
    ) -> torch.Tensor:
        """See CausalLM.forward; hidden [T, h] float32. A row's bits do not depend on the other rows."""
        return self._decoder.forward(batch, pool, self.team)[0]

    def forward_capturing(
        self,
        batch: ForwardBatch,
        pool: NativeKVPool,
        attention: AttentionBackend | None,
        layers: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See CausalLM.forward_capturing; both float32. Raises KernelError for a layer that the model lacks."""
        return self._decoder.forward(batch, pool, self.team, layers)

    def output_head(self, token_ids: torch.Tensor | None = None) -> NativeOutputHead:
        """See CausalLM.output_head."""
        linear = self.lm_head if token_ids is None else self.lm_head.select(token_ids)
        return NativeOutputHead(linear, self.team, self.activation_group)

    def tree(
        self, start: TreeStart, pool: NativeKVPool, output: NativeOutputHead, token_ids: torch.Tensor | None
    ) -> GrownTrees:
        """Chains or trees of this model's drafts, in one call; `output` is output_head(token_ids)."""
        return grow(self.kernels, self._decoder.handle, start, pool, self.team, output.linear, token_ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See CausalLM.compute_logits."""
        return self.lm_head.run(self.team, hidden.contiguous(), self.activation_group)

    def compute_argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """See CausalLM.compute_argmax; no logits are written."""
        return self.lm_head.argmax(self.team, hidden.contiguous(), self.activation_group)

    def truncated(self, num_layers: int) -> NativeCausalLM:
        """See CausalLM.truncated."""
        if not 1 <= num_layers <= self.num_layers:
            raise ModelError(f"truncated model: {num_layers} layers, must be between 1 and {self.num_layers}")
        kernels, shape, embedding, rotary, final_norm = self._parts
        config = dataclasses.replace(self.config, num_layers=num_layers)
        layers = self._layers[:num_layers]
        return NativeCausalLM(
            config,
            self.precision,
            kernels,
            self.team,
            shape,
            embedding,
            rotary,
            layers,
            final_norm,
            self.lm_head,
        )


def rotary_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines as the kernels take them, each [num_positions, head_dim / 2] float32."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def build_native(
    config: ModelConfig,
    tensors: TensorSource,
    precision: Precision,
    kernels: NativeKernels,
    team: ThreadTeam,
    *,
    lender: NativeCausalLM | None = None,
    float_format: WeightFormat | None = None,
    keep_blocks: bool = True,
) -> NativeCausalLM:
    """The model with its weights packed for the kernels; embedding and output head are those of `lender`, if any.

    precision is "int8" or "bfloat16". float_format overrides what float tensors become; without keep_blocks the
    quantised tensors of a GGUF are dequantised and packed like floats. Raises ModelError for a missing or misshapen
    tensor, or another precision.
    """
    if precision not in FLOAT_FORMATS:
        raise ModelError(f"precision: {precision!r}: the CPU kernels compute in {', '.join(FLOAT_FORMATS)}")
    format = FLOAT_FORMATS[precision] if float_format is None else float_format
    keep_blocks = keep_blocks and precision == "int8"
    return _Builder(config, tensors, precision, kernels, team, lender, format, keep_blocks).build()


class _Builder:
    def __init__(
        self,
        config: ModelConfig,
        tensors: TensorSource,
        precision: Precision,
        kernels: NativeKernels,
        team: ThreadTeam,
        lender: NativeCausalLM | None,
        format: WeightFormat,
        keep_blocks: bool,
    ) -> None:
        self._config = config
        self._lender = lender
        self._tensors = tensors
        self._precision: Precision = precision
        self._kernels = kernels
        self._team = team
        self._format = format
        self._blocks = tensors if keep_blocks and isinstance(tensors, BlockSource) else None

    def build(self) -> NativeCausalLM:
        config = self._config
        shape = DecoderShape(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
            _ACTIVATION_GROUPS.get(self._format, _DEFAULT_GROUP),
        )
        with ThreadPoolExecutor(max(1, min(_MAX_BUILD_THREADS, os.cpu_count() or 1))) as threads:
            ends = threads.submit(self._embedding_and_head)  # the largest tensors first
            layers = list(threads.map(lambda layer: self._layer(layer, shape), range(config.num_layers)))
            embedding, head = ends.result()
        return NativeCausalLM(
            config,
            self._precision,
            self._kernels,
            self._team,
            shape,
            embedding,
            rotary_tables(config.rope, config.head_dim, config.max_position_embeddings),
            layers,
            self._norm("model.norm", config.hidden_size),
            head,
        )

    def _embedding_and_head(self) -> tuple[torch.Tensor | PackedLinear, PackedLinear]:
        config = self._config
        if self._lender is not None:
            return self._lender.embedding, self._lender.lm_head
        name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        head = self._linear(
            [(name, config.num_embeddings)], config.hidden_size, False, rows=config.vocab_size
        )
        quantised = self._read_blocks(name, (config.num_embeddings, config.hidden_size)) is not None
        if config.tie_word_embeddings and (quantised or head.format is WeightFormat.BF16):
            return head, head  # one memory for both, and the head holds the table exactly
        shape = (config.num_embeddings, config.hidden_size)
        table = self._tensors.read(EMBEDDING, shape)
        if head.format is WeightFormat.BF16:
            table = table.to(torch.bfloat16)
        return table.contiguous(), head

    def _layer(self, layer: int, shape: DecoderShape) -> DecoderLayerWeights:
        config, prefix = self._config, f"model.layers.{layer}."
        h, d = config.hidden_size, config.head_dim
        q_rows, kv_rows, inner = config.num_heads * d, config.num_kv_heads * d, config.intermediate_size
        qkv = [("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)]
        return DecoderLayerWeights(
            qkv=self._linear([(f"{prefix}self_attn.{name}", n) for name, n in qkv], h, config.qkv_bias),
            o=self._linear([(f"{prefix}self_attn.o_proj", h)], q_rows, config.output_bias),
            gate_up=self._gate_up(f"{prefix}mlp.", shape),
            down=self._linear([(f"{prefix}mlp.down_proj", h)], inner, config.mlp_bias),
            attn_norm=self._norm(f"{prefix}input_layernorm", h),
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm", h),
            q_norm=self._norm(f"{prefix}self_attn.q_norm", d) if config.qk_norm else None,
            k_norm=self._norm(f"{prefix}self_attn.k_norm", d) if config.qk_norm else None,
        )

    def _linear(
        self, parts: list[tuple[str, int]], in_features: int, bias: bool, rows: int | None = None
    ) -> PackedLinear:
        """One linear whose columns are the rows of `parts` (name, rows) in order, or only the first `rows`."""
        linear = self._new(parts, in_features, rows or sum(count for _, count in parts))
        column = 0
        for name, count in parts:
            self._pack(linear, name, (count, in_features), column, 1, rows)
            column += count
        if bias:
            linear.set_bias(
                torch.cat([self._tensors.read(f"{name}.bias", (count,)) for name, count in parts])
            )
        return linear

    def _gate_up(self, prefix: str, shape: DecoderShape) -> PackedLinear:
        """Blocks of 16 columns of gate and up in turn."""
        h, inner = shape.hidden_size, shape.intermediate_size
        parts = [(f"{prefix}gate_proj", inner), (f"{prefix}up_proj", inner)]
        linear = self._new(parts, h, shape.interleaved_width)
        bias = torch.zeros(shape.interleaved_width // 2 // _INTERLEAVED_BLOCK, 2, _INTERLEAVED_BLOCK)
        for i, (name, count) in enumerate(parts):
            self._pack(linear, name, (count, h), i * _INTERLEAVED_BLOCK, 2, None)
            if self._config.mlp_bias:
                padded = torch.zeros(shape.interleaved_width // 2)
                padded[:count] = self._tensors.read(f"{name}.bias", (count,))
                bias[:, i] = padded.view(-1, _INTERLEAVED_BLOCK)
        if self._config.mlp_bias:
            linear.set_bias(bias.reshape(-1))
        return linear

    def _new(self, parts: list[tuple[str, int]], in_features: int, columns: int) -> PackedLinear:
        """An empty linear in the parts' own block format if they share one, else in the float format."""
        kinds = {self._kind(name, (count, in_features)) for name, count in parts}
        kind = kinds.pop() if len(kinds) == 1 else None
        format = self._format if kind is None else _BLOCK_FORMATS[kind][1]
        return PackedLinear(self._kernels, format, columns, in_features)

    def _kind(self, name: str, shape: tuple[int, int]) -> str | None:
        found = self._read_blocks(name, shape)
        return None if found is None else found[0]

    def _read_blocks(self, name: str, shape: tuple[int, int]) -> tuple[str, torch.Tensor] | None:
        """The blocks of a weight if a kernel takes them as they are."""
        found = None if self._blocks is None else self._blocks.read_blocks(f"{name}.weight", shape)
        return found if found is not None and found[0] in _BLOCK_FORMATS else None

    def _pack(
        self,
        linear: PackedLinear,
        name: str,
        shape: tuple[int, int],
        column: int,
        stride: int,
        rows: int | None,
    ) -> None:
        found = self._read_blocks(name, shape)
        if found is not None and _BLOCK_FORMATS[found[0]][1] is linear.format:
            blocks = found[1][:rows].contiguous()
            linear.pack_blocks(_BLOCK_FORMATS[found[0]][0], blocks, column, stride)
        else:
            linear.pack_floats(self._tensors.read(f"{name}.weight", shape)[:rows], column, stride)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        return self._tensors.read(f"{name}.weight", (size,)).to(torch.float32).contiguous()
