"""Float weights of draft heads as the CPU kernels take them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gpu_worker.kernels.linear import PackedLinear, WeightFormat
from gpu_worker.kernels.native import NativeKernels


def pack_linear(
    kernels: NativeKernels, format: WeightFormat, tensors: Mapping[str, torch.Tensor], names: list[str]
) -> PackedLinear:
    """One linear whose columns are the rows of the weights `names` in order, with their biases if they have any."""
    weights = [tensors[f"{name}.weight"] for name in names]
    linear = PackedLinear(kernels, format, sum(len(weight) for weight in weights), weights[0].shape[1])
    column = 0
    for weight in weights:
        linear.pack_floats(weight, column)
        column += len(weight)
    if f"{names[0]}.bias" in tensors:
        linear.set_bias(torch.cat([tensors[f"{name}.bias"] for name in names]))
    return linear
