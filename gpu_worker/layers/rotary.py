"""Rotary position embedding: the frequencies of each scaling kind, and the rotation of queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary parameters; which fields count depends on `kind`. Lengths are in tokens."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn: how far the context is stretched
    original_max_position_embeddings: int = 0  # llama3, yarn: the context before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it
    truncate: bool = True  # yarn: round the bounds of the ramp to whole dimensions
    frequency_divisors: tuple[float, ...] = ()  # per frequency, as a GGUF's rope_freqs tensor gives them


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32, radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.frequency_divisors:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies, head_dim)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow frequencies divided by the factor, fast ones kept, a blend between (Llama 3.1 reference code)."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN's NTK-by-parts interpolation (Peng et al. 2023, section 3.2)."""

    def dimension_of(turns: float) -> float:
        """The (fractional) frequency index that makes `turns` rotations over the original context."""
        context = rope.original_max_position_embeddings
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    index = torch.arange(head_dim // 2, dtype=torch.float32)
    interpolate = ((index - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / rope.factor * interpolate + frequencies * (1 - interpolate)


class RotaryEmbedding:
    """cos and sin of every position, tabulated once.

    A table and not a computation per step: a vectorised cosine may round the last elements of a tensor
    differently, and a row must not depend on how many rows run beside it.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(rope, head_dim)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(rope.attention_factor)
        self._table = table.to(device)  # [num_positions, head_dim] float32: cos, then sin
        self._dtype = dtype

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] int64 -> cos and signed sin, both [T, 1, head_dim], for `rotate`."""
        cos, sin = self._table.index_select(0, positions).to(self._dtype).unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (i, i + D/2) of each head (Su et al. 2021, in the half-split layout).

    x [T, H, D], cos and signed_sin [T, 1, D] from RotaryEmbedding.at -> [T, H, D]. signed_sin carries the
    minus of the first half, so the rotation is x * cos + swap_halves(x) * signed_sin.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)
