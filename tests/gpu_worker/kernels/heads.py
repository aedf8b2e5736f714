"""Random draft heads of every form, and what they compute in float64 numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from gpu_worker.kernels.decoder import DecoderLayerWeights, DecoderShape
from gpu_worker.kernels.draft_head import DraftHeadWeights, NativeDraftHead
from gpu_worker.kernels.draft_trees import TreeStart
from gpu_worker.kernels.linear import PackedLinear, WeightFormat
from gpu_worker.kernels.native import Isa, NativeKernels
from tests.gpu_worker.kernels import reference
from tests.gpu_worker.kernels.reference import Array, as_bfloat16, rms_norm
from tests.gpu_worker.kernels.schedules import Sequence

# Sizes that are no multiples of 64: both halves of a pair share a slab of inputs.
SHAPE = DecoderShape(96, 160, 4, 2, 24, 1e-5)
VOCAB, POSITIONS = 300, 512
DRAFT_VOCAB = 200


@dataclass(frozen=True)
class Form:
    """Which parts a head has."""

    num_layers: int = 1
    fused: int = 0  # number of hidden states that fuse takes
    combines: bool = True
    bias: bool = False
    pair_norms: bool = False
    embedding_first: bool = True
    first_norm: bool = True
    residual_is_normed: bool = False
    final_norm: bool = True
    recycles_normed: bool = False


FORMS = {
    "eagle original": Form(first_norm=False, final_norm=False, bias=True),
    "eagle with norms": Form(num_layers=2, recycles_normed=True),
    "eagle 3": Form(fused=3, combines=False, pair_norms=True, first_norm=False),
    "eagle 3, normed residual": Form(
        num_layers=2, fused=3, combines=False, pair_norms=True, first_norm=False, residual_is_normed=True
    ),
    "mtp": Form(pair_norms=True),
    "mtp, hidden first": Form(pair_norms=True, embedding_first=False, recycles_normed=True),
}


@dataclass
class Head:
    """A native head with the float weights that it was packed from."""

    form: Form
    native: NativeDraftHead
    isa: Isa
    embedding: torch.Tensor
    lm_head: PackedLinear
    target_ids: torch.Tensor
    floats: dict[int, Array] = field(default_factory=dict)  # by id of the packed linear
    biases: dict[int, Array] = field(default_factory=dict)
    cos: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    sin: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def hidden_states(
        self, ids: list[int], features: Array, num_target: int, *, exact: bool = False
    ) -> tuple[Array, Array]:
        """(recycled, normed) [n, h] of one causal sequence; the first num_target feature rows are the target's.

        features [n, F]; recycled rows stand in the first h columns. exact: float weights, nothing is rounded.
        """
        weights, shape = self.native.weights, self.native.shape
        h, d, n, eps = shape.hidden_size, shape.head_dim, len(ids), shape.rms_norm_eps
        round_pairs = self.isa is Isa.AVX512_BF16 and not exact

        def run(linear: PackedLinear, x: Array) -> Array:
            bias = self.biases.get(id(linear))
            if exact:
                out: Array = x @ self.floats[id(linear)].T
                return out if bias is None else out + bias
            return reference.product(linear, x, shape.activation_group, bias, round_pairs=round_pairs)

        def norm(x: Array, weight: torch.Tensor | None) -> Array:
            return x if weight is None else rms_norm(x, weight, eps)

        f = features[:, :h].copy()
        if weights.fuse is not None and num_target > 0:
            f[:num_target] = run(weights.fuse, features[:num_target])
        pair = [
            norm(self.embedding[ids].double().numpy(), weights.embedding_norm),
            norm(f, weights.feature_norm),
        ]
        both = np.concatenate(pair if weights.embedding_first else pair[::-1], axis=1)
        x = pair[1] if weights.residual_is_normed else f
        if weights.combine is not None:
            x = run(weights.combine, both)
        cos, sin = (table[:n].double().numpy() for table in (self.cos, self.sin))
        for i, layer in enumerate(weights.layers):
            attends = both if i == 0 and weights.combine is None else norm(x, layer.attn_norm)
            qkv = run(layer.qkv, attends).reshape(n, -1, d)
            q, k, v = np.split(qkv, [shape.num_heads, shape.num_heads + shape.num_kv_heads], axis=1)
            q, k = reference.rotated(q, cos, sin), reference.rotated(k, cos, sin)
            if not exact:
                k, v = as_bfloat16(k), as_bfloat16(v)
            repeats = shape.num_heads // shape.num_kv_heads
            attended = reference.attention(
                q * (np.log2(np.e) / np.sqrt(d)),
                k.repeat(repeats, axis=1),
                v.repeat(repeats, axis=1),
                round_pairs=round_pairs,
            )
            x = x + run(layer.o, attended.reshape(n, -1))
            gate_up = run(layer.gate_up, norm(x, layer.mlp_norm)).reshape(n, -1, 2, 16)
            gate, up = (gate_up[:, :, j].reshape(n, -1)[:, : shape.intermediate_size] for j in (0, 1))
            x = x + run(layer.down, gate / (1 + np.exp(-gate)) * up)
        normed = norm(x, weights.final_norm)
        return normed if weights.recycles_normed else x, normed


def make_head(
    kernels: NativeKernels, form: Form, format: WeightFormat, shape: DecoderShape = SHAPE, seed: int = 0
) -> Head:
    """A head with random weights over an embedding of VOCAB rows."""
    generator = torch.Generator().manual_seed(seed)
    floats: dict[int, Array] = {}
    biases: dict[int, Array] = {}

    def linear(n: int, k: int, bias: bool = False) -> PackedLinear:
        packed = PackedLinear(kernels, format, n, k)
        weight = torch.randn(n, k, generator=generator) / k**0.5
        packed.pack_floats(weight)
        floats[id(packed)] = weight.double().numpy()
        if bias:
            values = torch.randn(n, generator=generator)
            packed.set_bias(values)
            biases[id(packed)] = values.double().numpy()
        return packed

    def norm() -> torch.Tensor:
        return 1 + 0.3 * torch.randn(h, generator=generator)

    h, inner = shape.hidden_size, shape.intermediate_size

    def gate_up() -> PackedLinear:
        packed = PackedLinear(kernels, format, shape.interleaved_width, h)
        laid = torch.zeros(shape.interleaved_width // 32, 2, 16, h)
        for i in range(2):
            weight = torch.randn(inner, h, generator=generator) / h**0.5
            packed.pack_floats(weight, 16 * i, 2)
            padded = torch.zeros(shape.interleaved_width // 2, h)
            padded[:inner] = weight
            laid[:, i] = padded.view(-1, 16, h)
        floats[id(packed)] = laid.view(-1, h).double().numpy()
        return packed

    def layer(index: int) -> DecoderLayerWeights:
        first = index == 0
        return DecoderLayerWeights(
            qkv=linear(shape.qkv_width, h if form.combines or not first else 2 * h),
            o=linear(h, shape.num_heads * shape.head_dim),
            gate_up=gate_up(),
            down=linear(h, inner),
            attn_norm=norm() if form.first_norm or not first else None,
            mlp_norm=norm(),
        )

    weights = DraftHeadWeights(
        layers=[layer(i) for i in range(form.num_layers)],
        fuse=linear(h, form.fused * h) if form.fused else None,
        combine=linear(h, 2 * h, form.bias) if form.combines else None,
        embedding_norm=norm() if form.pair_norms else None,
        feature_norm=norm() if form.pair_norms else None,
        embedding_first=form.embedding_first,
        residual_is_normed=form.residual_is_normed,
        final_norm=norm() if form.final_norm else None,
        recycles_normed=form.recycles_normed,
    )
    embedding = torch.randn(VOCAB, h, generator=generator)
    angles = torch.arange(POSITIONS)[:, None] * 10000.0 ** -(
        torch.arange(shape.head_dim // 2) * 2 / shape.head_dim
    )
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    native = NativeDraftHead(kernels, shape, embedding, cos, sin, weights)
    target_ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].contiguous()
    return Head(
        form,
        native,
        kernels.isa,
        embedding,
        linear(DRAFT_VOCAB, h),
        target_ids,
        floats,
        biases,
        cos,
        sin,
    )


def random_text(n: int, width: int, seed: int) -> tuple[list[int], torch.Tensor]:
    """Ids and feature rows of n tokens."""
    ids = np.random.default_rng(seed).integers(0, VOCAB, n).tolist()
    return ids, torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def tree_start(
    sequences: list[Sequence],
    hidden: torch.Tensor,
    normed: torch.Tensor,
    budgets: list[int],
    max_depth: int,
    max_children: int,
    least_value: float = -math.inf,
) -> TreeStart:
    """The start of drafts behind the computed tokens of each sequence, whose pages of 16 hold them."""
    return TreeStart(
        hidden,
        normed,
        16,
        np.array([s.num_computed for s in sequences], np.int32),
        np.cumsum([0, *(len(s.pages) for s in sequences)]).astype(np.int32),
        np.concatenate([s.pages for s in sequences]).astype(np.int32),
        np.array(budgets, np.int32),
        max_depth,
        max_children,
        least_value,
    )
