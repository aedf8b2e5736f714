"""The native decoder's arithmetic in float64 numpy: same weights, same activation quantisation, no cleverness."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.kernels.linear import PackedLinear, WeightFormat
from gpu_worker.kernels.native import Isa
from gpu_worker.models.native import NativeCausalLM

Array = npt.NDArray[np.float64]


def as_bfloat16(x: Array) -> Array:
    return torch.from_numpy(x).to(torch.float32).to(torch.bfloat16).double().numpy()


def quantised(x: Array, group: int) -> Array:
    """x [M, k] as the kernels see it: int8 with one float32 scale per row and `group` inputs."""
    rows, k = x.shape
    padded = np.zeros((rows, -(-k // 64) * 64), np.float32)
    padded[:, :k] = x
    groups = padded.reshape(rows, -1, group)
    peak = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(peak > 0, np.float32(127) / peak, np.float32(0))
    values = np.rint(groups * inverse).astype(np.float64) * (peak / np.float32(127))
    return values.reshape(rows, -1)[:, :k]


def weights(linear: PackedLinear) -> Array:
    """[n, k] as stored."""
    return linear.dequantise(range(linear.out_features)).double().numpy()


def product(
    linear: PackedLinear, x: Array, group: int, bias: Array | None = None, *, round_pairs: bool = True
) -> Array:
    """What linear.run computes. round_pairs: this instruction set rounds activations to bfloat16 for BF16 weights."""
    seen = x
    if linear.format is not WeightFormat.BF16:
        seen = quantised(x, group)
    elif round_pairs:
        seen = as_bfloat16(x)
    out = seen @ weights(linear).T
    return out if bias is None else out + bias


def rms_norm(x: Array, weight: torch.Tensor | Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.asarray(weight, dtype=np.float64)


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """x [T, H, D], cos and sin [T, D / 2]."""
    a, b = np.split(x, 2, axis=-1)
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def attention(q: Array, k: Array, v: Array, *, round_pairs: bool) -> Array:
    """Causal attention, q [n, H, D] already scaled by log2(e) / sqrt(D), k and v [n, H, D], in blocks of 128 keys."""
    n = len(q)
    if round_pairs:
        q = as_bfloat16(q)
    scores = np.where(np.tril(np.ones((n, n), bool)), np.einsum("ihd,jhd->hij", q, k), -np.inf)
    peak = scores.max(-1, keepdims=True)
    total, out = 0.0, 0.0
    for begin in range(0, n, 128):
        block = scores[..., begin : begin + 128]
        block_peak = block.max(-1, keepdims=True)
        seen = np.isfinite(block_peak)
        weights = np.exp2(block - np.where(seen, block_peak, 0))
        if round_pairs:
            weights = as_bfloat16(weights)
        weights = weights * np.where(seen, np.exp2(block_peak - peak), 0)
        total = total + weights.sum(-1, keepdims=True)
        out = out + np.einsum("hij,jhd->hid", weights, v[begin : begin + 128])
    return (out / total).transpose(1, 0, 2)


def hidden_states(model: NativeCausalLM, ids: list[int]) -> Array:
    """Hidden [n, h] of one causal sequence, after the final norm; models without biases."""
    kernels, shape, embedding, (cos_table, sin_table), final_norm = model._parts
    n, d, group, eps = len(ids), shape.head_dim, shape.activation_group, shape.rms_norm_eps
    round_pairs = kernels.isa is Isa.AVX512_BF16

    def run(linear: PackedLinear, x: Array) -> Array:
        return product(linear, x, group, round_pairs=round_pairs)

    cos, sin = (table[:n].double().numpy() for table in (cos_table, sin_table))
    table = embedding.dequantise(ids) if isinstance(embedding, PackedLinear) else embedding[ids]
    x = table.double().numpy()
    for layer in model._layers:
        qkv = run(layer.qkv, rms_norm(x, layer.attn_norm, eps)).reshape(n, -1, d)
        q, k, v = np.split(qkv, [shape.num_heads, shape.num_heads + shape.num_kv_heads], axis=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)
        q, k, v = rotated(q, cos, sin), as_bfloat16(rotated(k, cos, sin)), as_bfloat16(v)
        repeats = shape.num_heads // shape.num_kv_heads
        q = q * (np.log2(np.e) / np.sqrt(d))
        attended = attention(q, k.repeat(repeats, axis=1), v.repeat(repeats, axis=1), round_pairs=round_pairs)
        x = x + run(layer.o, attended.reshape(n, -1))
        both = run(layer.gate_up, rms_norm(x, layer.mlp_norm, eps)).reshape(n, -1, 2, 16)
        gate, up = (both[:, :, i].reshape(n, -1)[:, : shape.intermediate_size] for i in (0, 1))
        x = x + run(layer.down, gate / (1 + np.exp(-gate)) * up)
    return rms_norm(x, final_norm, eps)
