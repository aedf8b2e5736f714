"""Medusa's heads: their residual blocks, and their candidates in one call."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker.kernels.linear import PackedLinear, WeightFormat
from gpu_worker.kernels.medusa import medusa_candidates, residual_blocks
from gpu_worker.kernels.native import Isa, KernelError, NativeKernels
from tests.gpu_worker.kernels import reference
from tests.gpu_worker.kernels.conftest import Teams


@pytest.mark.parametrize("format", [WeightFormat.Q8_0, WeightFormat.BF16], ids=lambda f: f.name)
@pytest.mark.parametrize("h", [96, 100])
def test_residual_blocks(kernels: NativeKernels, teams: Teams, format: WeightFormat, h: int) -> None:
    """Against float64, and every row alone by one thread; h may be no multiple of a block of columns."""
    num_heads, rows = 3, 270
    generator = torch.Generator().manual_seed(h)
    linear = PackedLinear(kernels, format, num_heads * h, h)
    linear.pack_floats(torch.randn(num_heads * h, h, generator=generator) / h**0.5)
    bias = torch.randn(num_heads * h, generator=generator)
    linear.set_bias(bias)
    x = torch.randn(rows, h, generator=generator)
    out = residual_blocks(linear, teams(3), x)
    inner = reference.product(
        linear, x.double().numpy(), 32, bias.double().numpy(), round_pairs=kernels.isa is Isa.AVX512_BF16
    )
    activated = torch.from_numpy(inner / (1 + np.exp(-inner))).view(rows, num_heads, h)
    torch.testing.assert_close(out, (x[:, None] + activated).float(), rtol=1e-4, atol=1e-4)
    for i in (0, 17, rows - 1):
        assert torch.equal(residual_blocks(linear, teams(1), x[i : i + 1].clone())[0], out[i])


def test_residual_blocks_that_do_not_fit_are_refused(kernels: NativeKernels, teams: Teams) -> None:
    linear = PackedLinear(kernels, WeightFormat.Q8_0, 100, 64)
    with pytest.raises(KernelError, match="100 outputs are no multiple of its 64 inputs"):
        residual_blocks(linear, teams(1), torch.zeros(1, 64))
    with pytest.raises(KernelError, match=r"x: torch\.float32 \[1, 65\]"):
        residual_blocks(linear, teams(1), torch.zeros(1, 65))


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("rows", "num_heads"), [(1, 1), (1, 3), (5, 2), (70, 1)])
def test_candidates_are_those_of_the_steps(
    kernels: NativeKernels, teams: Teams, rows: int, num_heads: int, reduced: bool
) -> None:
    h, columns, count = 96, 300, 7
    generator = torch.Generator().manual_seed(rows + num_heads)
    linear = PackedLinear(kernels, WeightFormat.Q8_0, 3 * h, h)
    linear.pack_floats(torch.randn(3 * h, h, generator=generator) / h**0.5)
    lm_head = PackedLinear(kernels, WeightFormat.Q8_0, columns, h)
    lm_head.pack_floats(torch.randn(columns, h, generator=generator))
    ids = torch.randperm(5000, generator=generator)[:columns] if reduced else None
    x = torch.randn(rows, h, generator=generator)
    found, values = medusa_candidates(linear, lm_head, teams(3), x, num_heads, count, ids, 32)
    states = residual_blocks(linear, teams(1), x)[:, :num_heads].reshape(rows * num_heads, h).contiguous()
    best, logits, lse = lm_head.topk(teams(1), states, count, 32)
    expected = best if ids is None else ids[best]
    assert found.tolist() == expected.view(rows, num_heads, count).tolist()
    assert values.tolist() == (logits - lse[:, None]).view(rows, num_heads, count).tolist()
    assert (np.diff(values, axis=-1) <= 0).all()


def test_candidates_that_do_not_fit_are_refused(kernels: NativeKernels, teams: Teams) -> None:
    linear = PackedLinear(kernels, WeightFormat.Q8_0, 128, 64)
    lm_head, other = (PackedLinear(kernels, WeightFormat.Q8_0, 100, width) for width in (64, 96))
    x = torch.zeros(1, 64)
    for heads in (0, 3):
        with pytest.raises(KernelError, match=f"heads: {heads}, must be between 1 and 2"):
            medusa_candidates(linear, lm_head, teams(1), x, heads, 4)
    with pytest.raises(KernelError, match="lm_head: 96 inputs, the blocks give 64"):
        medusa_candidates(linear, other, teams(1), x, 1, 4)
    with pytest.raises(KernelError, match="65"):
        medusa_candidates(linear, lm_head, teams(1), x, 1, 65)
    with pytest.raises(KernelError, match=r"target_ids: .* \[99\]"):
        medusa_candidates(linear, lm_head, teams(1), x, 1, 4, torch.zeros(99, dtype=torch.int64))
