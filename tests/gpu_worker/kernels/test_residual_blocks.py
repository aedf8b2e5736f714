"""The residual blocks of Medusa's heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker.kernels.draft_head import residual_blocks
from gpu_worker.kernels.linear import PackedLinear, WeightFormat
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
