"""Packed linears: every format against a float64 product with the same quantisation; heads against their logits."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch

from gpu_worker.kernels.linear import BlockKind, PackedLinear, WeightFormat
from gpu_worker.kernels.native import Isa, KernelError, NativeKernels, ThreadTeam
from tests.gpu_worker.kernels import reference

Teams = Callable[[int], ThreadTeam]


def packed(kernels: NativeKernels, format: WeightFormat, n: int, k: int, seed: int = 0) -> PackedLinear:
    """Random weights in `format`."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / k**0.5
    linear = PackedLinear(kernels, format, n, k)
    if format in (WeightFormat.Q4_0, WeightFormat.Q4_1):
        linear.pack_blocks(BlockKind[format.name], blocks_of(weight, format.name))
    else:
        linear.pack_floats(weight)
    return linear


def blocks_of(weight: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind]))


def inputs(rows: int, k: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))


def assert_product(
    linear: PackedLinear, x: torch.Tensor, group: int, team: ThreadTeam, bias: object = None
) -> None:
    expected = reference.product(
        linear, x.double().numpy(), group, bias, round_pairs=linear.kernels.isa is Isa.AVX512_BF16
    )
    actual = linear.run(team, x, group).double().numpy()
    assert np.abs(actual - expected).max() < 2e-5 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("format", list(WeightFormat), ids=lambda format: format.name)
@pytest.mark.parametrize(("n", "k"), [(48, 64), (100, 192), (17, 96), (16, 576), (1, 32)])
def test_product_equals_float64_with_the_same_quantisation(
    kernels: NativeKernels, teams: Teams, format: WeightFormat, n: int, k: int
) -> None:
    linear = packed(kernels, format, n, k)
    for rows, group in ((1, 64), (5, 64), (13, 32), (29, 32)):
        if format is not WeightFormat.W8 or group == 64:
            assert_product(linear, inputs(rows, k), group, teams(2))


@pytest.mark.parametrize(
    "format", [WeightFormat.W8, WeightFormat.Q8_0, WeightFormat.BF16], ids=lambda f: f.name
)
def test_inputs_that_fill_no_block(kernels: NativeKernels, teams: Teams, format: WeightFormat) -> None:
    assert_product(packed(kernels, format, 40, 90), inputs(3, 90), 64, teams(1))


def test_extreme_activations(kernels: NativeKernels, teams: Teams) -> None:
    """Zero rows, one huge value, and all values at the bound, where 16-bit intermediate sums are largest."""
    for format in WeightFormat:
        linear = packed(kernels, format, 32, 128)
        x = torch.zeros(4, 128)
        x[1, 5] = 1e6
        x[2] = -3.0
        x[3] = torch.where(torch.arange(128) % 2 == 0, 2.0, -2.0)
        assert_product(linear, x, 64, teams(2))
        assert torch.equal(linear.run(teams(2), x)[0], torch.zeros(32))


def test_largest_weights_do_not_saturate(kernels: NativeKernels, teams: Teams) -> None:
    for format in (WeightFormat.W8, WeightFormat.Q8_0):
        linear = PackedLinear(kernels, format, 16, 64)
        linear.pack_floats(torch.where(torch.arange(64) % 3 == 0, 1.0, -1.0).expand(16, 64))
        assert_product(linear, torch.where(torch.arange(64) % 3 == 0, 1.0, -1.0)[None], 64, teams(1))


@pytest.mark.parametrize("kind", list(BlockKind), ids=lambda kind: kind.name)
def test_gguf_blocks_keep_their_exact_values(kernels: NativeKernels, kind: BlockKind) -> None:
    blocks = blocks_of(torch.randn(37, 96, generator=torch.Generator().manual_seed(3)), kind.name)
    linear = PackedLinear(kernels, WeightFormat[kind.name], 37, 96)
    linear.pack_blocks(kind, blocks)
    expected = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind.name])
    assert np.array_equal(linear.dequantise(range(37)).numpy(), expected)


def test_q4_0_blocks_as_q4_1(kernels: NativeKernels) -> None:
    """A fused linear may join both types: Q4_0 is Q4_1 with the minimum -8 d."""
    blocks = blocks_of(torch.randn(16, 64, generator=torch.Generator().manual_seed(4)), "Q4_0")
    linear = PackedLinear(kernels, WeightFormat.Q4_1, 16, 64)
    linear.pack_blocks(BlockKind.Q4_0, blocks)
    expected = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(linear.dequantise(range(16)).numpy(), expected)


def test_bias(kernels: NativeKernels, teams: Teams) -> None:
    linear = packed(kernels, WeightFormat.Q8_0, 40, 64)
    bias = torch.linspace(-1, 1, 40)
    linear.set_bias(bias)
    assert_product(linear, inputs(7, 64), 32, teams(2), bias.double().numpy())


@pytest.mark.parametrize("format", list(WeightFormat), ids=lambda format: format.name)
def test_rows_do_not_depend_on_their_neighbours(
    kernels: NativeKernels, teams: Teams, format: WeightFormat
) -> None:
    """Up to 64 rows and in a prefill of several chunks, with 1 to 4 threads, in any order: the same bits."""
    linear, x = packed(kernels, format, 80, 192), inputs(600, 192)
    alone = torch.cat([linear.run(teams(1), x[i : i + 1]) for i in range(64)])
    for rows in (*range(1, 26), 31, 48, 64):
        assert torch.equal(linear.run(teams(rows % 4 + 1), x[:rows]), alone[:rows])
    order = torch.randperm(600, generator=torch.Generator().manual_seed(5))
    assert torch.equal(linear.run(teams(3), x[order])[order.argsort()[:64]], alone)


@pytest.mark.parametrize("format", [WeightFormat.Q8_0, WeightFormat.BF16], ids=lambda format: format.name)
def test_head_without_logits(kernels: NativeKernels, teams: Teams, format: WeightFormat) -> None:
    """argmax, top-k and log-sum-exp are those of the full logits; the sum has the same bits for any threads."""
    linear, x = packed(kernels, format, 1003, 64), inputs(50, 64)
    logits = linear.run(teams(2), x)
    assert torch.equal(linear.argmax(teams(3), x), logits.argmax(1))
    for k in (1, 7, 64):
        ids, values, lse = linear.topk(teams(2), x, k)
        expected = logits.topk(k)
        assert torch.equal(values, expected.values)
        assert torch.equal(logits.gather(1, ids), values)
        torch.testing.assert_close(lse, logits.logsumexp(1), atol=2e-6, rtol=1e-6)
        for threads in (1, 4):
            assert torch.equal(linear.topk(teams(threads), x[:9], k)[2], lse[:9])


def test_no_rows(kernels: NativeKernels, teams: Teams) -> None:
    """Work of nothing ends at once: threads that share out no items would wait for each other for ever."""
    linear, x = packed(kernels, WeightFormat.Q8_0, 80, 64), torch.zeros(0, 64)
    assert linear.run(teams(2), x).shape == (0, 80)
    assert linear.argmax(teams(2), x).shape == (0,)
    assert [tuple(part.shape) for part in linear.topk(teams(2), x, 4)] == [(0, 4), (0, 4), (0,)]


def test_ties_go_to_the_lowest_id(kernels: NativeKernels, teams: Teams) -> None:
    weight = torch.randn(700, 64, generator=torch.Generator().manual_seed(6))
    weight[400:650] = weight[1:251]
    linear = PackedLinear(kernels, WeightFormat.Q8_0, 700, 64)
    linear.pack_floats(weight)
    x = weight[[401, 7, 649]] * 3
    assert linear.argmax(teams(4), x).tolist() == [2, 7, 250]
    assert linear.topk(teams(4), x, 2)[0].tolist() == [[2, 401], [7, 406], [250, 649]]


@pytest.mark.parametrize("format", list(WeightFormat), ids=lambda format: format.name)
def test_reduced_vocabulary(kernels: NativeKernels, teams: Teams, format: WeightFormat) -> None:
    linear, x = packed(kernels, format, 90, 128), inputs(4, 128)
    linear.set_bias(torch.linspace(0, 1, 90))
    columns = [89, 3, 3, 0, *range(20, 55)]
    assert torch.equal(linear.select(columns).run(teams(2), x), linear.run(teams(2), x)[:, columns])


def test_bytes_of_the_four_bit_format(kernels: NativeKernels) -> None:
    assert PackedLinear(kernels, WeightFormat.Q4_1, 64, 128).num_bytes == 64 * 128 * 20 // 32


def test_errors_name_what_is_wrong(kernels: NativeKernels, teams: Teams) -> None:
    linear = packed(kernels, WeightFormat.W8, 32, 64)
    with pytest.raises(KernelError, match=r"x: torch.float64 \[2, 64\], expected torch.float32 \[2, 64\]"):
        linear.run(teams(1), torch.zeros(2, 64, dtype=torch.float64))
    with pytest.raises(KernelError, match="strides"):
        linear.run(teams(1), torch.zeros(64, 2).t())
    with pytest.raises(KernelError, match="activation_group: weights W8 need groups of 64, not 32"):
        linear.run(teams(1), torch.zeros(2, 64), 32)
    with pytest.raises(KernelError, match="activation_group: 16"):
        linear.run(teams(1), torch.zeros(2, 64), 16)
    with pytest.raises(KernelError, match=r"columns: 32 is not in 0\.\.31"):
        linear.select([32])
    with pytest.raises(KernelError, match="columns: up to 47 of 32"):
        linear.pack_floats(torch.zeros(32, 64), first_column=16)
    with pytest.raises(KernelError, match="count: 65"):
        linear.topk(teams(1), torch.zeros(1, 64), 65)
    with pytest.raises(KernelError, match="Q4_1 cannot be packed from floats"):
        PackedLinear(kernels, WeightFormat.Q4_1, 16, 64).pack_floats(torch.zeros(16, 64))
    with pytest.raises(KernelError, match="num_threads: 0"):
        ThreadTeam(kernels, 0)
