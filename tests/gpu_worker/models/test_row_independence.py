"""What int8 inference rests on: a row's result is the same bit for bit whatever rows run beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gpu_worker.layers.linear import Int8Linear, make_linear
from gpu_worker.layers.mlp import GatedMLP
from gpu_worker.layers.norm import RMSNorm
from gpu_worker.layers.rotary import RopeConfig, RotaryEmbedding, rotate

BATCHES = (1, 2, 3, 5, 8, 17, 33, 64)
CPU = torch.device("cpu")


def assert_rows_independent(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> None:
    """`function` gives each row, among any others and in any place, what it gives the row alone."""
    with torch.inference_mode():
        alone = torch.cat([function(rows[i : i + 1].clone()) for i in range(len(rows))])
        for size in BATCHES:
            assert torch.equal(function(rows[:size].clone()), alone[:size]), f"{size} rows"
            assert torch.equal(function(rows[-size:].flip(0)), alone[-size:].flip(0)), f"{size} rows reversed"


def activations(features: int, seed: int = 0) -> torch.Tensor:
    """[64, features] with outliers in some rows only, as transformers' activations have."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(64, features, generator=generator)
    rows[::7] *= 40.0
    rows[3, features // 2] = 300.0
    return rows


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (7, 13), (1, 64), (65, 3), (300, 64)])
def test_int8_linear(out_features: int, in_features: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out_features, in_features, generator=generator)
    linear = Int8Linear(weight, torch.randn(out_features, generator=generator) if bias else None)
    assert_rows_independent(linear, activations(in_features))


@pytest.mark.parametrize("hidden", [64, 576, 1000])
def test_rms_norm(hidden: int) -> None:
    norm = RMSNorm(torch.rand(hidden, generator=torch.Generator().manual_seed(2)) + 0.5, 1e-5)
    assert_rows_independent(norm, activations(hidden))


@pytest.mark.parametrize(("hidden", "intermediate"), [(576, 1536), (64, 128), (32, 72)])
def test_int8_mlp(hidden: int, intermediate: int) -> None:
    generator = torch.Generator().manual_seed(3)
    gate_up = torch.randn(2 * intermediate, hidden, generator=generator)
    down = torch.randn(hidden, intermediate, generator=generator)
    mlp = GatedMLP(make_linear(gate_up, None, "int8", CPU), make_linear(down, None, "int8", CPU))
    assert_rows_independent(mlp, activations(hidden))


@pytest.mark.parametrize("head_dim", [8, 16, 64])
def test_rotation(head_dim: int) -> None:
    rotary = RotaryEmbedding(RopeConfig(), head_dim, 256, torch.float32, CPU)
    positions = torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(4))
    heads = torch.randn(64, 3, head_dim, generator=torch.Generator().manual_seed(5))

    def function(indices: torch.Tensor) -> torch.Tensor:
        return rotate(heads[indices], *rotary.at(positions[indices]))

    assert_rows_independent(function, torch.arange(64))


def test_int8_linear_approximates_the_product() -> None:
    generator = torch.Generator().manual_seed(6)
    weight, rows = torch.randn(96, 128, generator=generator), torch.randn(9, 128, generator=generator)
    bias = torch.randn(96, generator=generator)
    expected = rows @ weight.T + bias
    # Two roundings of relative size 1/254 of each row's largest element, over 128 terms.
    assert (Int8Linear(weight, bias)(rows) - expected).abs().max() < 1.0
    assert torch.cosine_similarity(Int8Linear(weight, bias)(rows), expected, dim=1).min() > 0.999


def test_int8_linear_of_zeros_is_its_bias() -> None:
    bias = torch.arange(4.0)
    linear = Int8Linear(torch.zeros(4, 8), bias)
    assert torch.equal(linear(torch.zeros(2, 8)), bias.expand(2, 4))
    assert torch.equal(Int8Linear(torch.ones(4, 8), bias)(torch.zeros(1, 8)), bias.expand(1, 4))
