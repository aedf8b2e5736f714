"""Matrix products of every layer, in the model's precision: float32, bfloat16, or int8.

One place decides how a weight is held: `make_linear`. Layers call what it returns and know nothing of
precision.
"""

from __future__ import annotations

import copy
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

Precision = Literal["float32", "bfloat16", "int8"]

# The activations' dtype between linears (residual stream, norms, attention, KV unless the pool says
# otherwise).
ACTIVATION_DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.float32,
}

_INT8_MAX = 127.0
_SMALLEST_SCALE = 1e-30  # a row of zeros must not divide by zero
# cuBLASLt refuses int8 products of at most 16 rows and sizes that are not multiples of 8; CPUs take any.
_CUDA_MIN_ROWS = 32
_CUDA_MULTIPLE = 8


class AnyLinear(Protocol):
    """What layers need of a linear: [M, in] -> [M, out] in the activations' dtype."""

    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Linear:
    """x @ weight.T + bias in the weight's own float dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight [out, in] and bias [out], both float32 or both bfloat16."""
        self.weight = weight
        self.bias = bias
        self.out_features = weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Int8Linear:
    """int8 weights, one scale per output channel; int8 activations, one scale per token, computed on the fly.

    Each row is quantised by its own largest magnitude and multiplied in integers, so a row's result is the
    same bit for bit whatever rows run beside it (a scale per tensor, or a float product, does not have this
    property).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight [out, in] in any float dtype, quantised here; bias [out] float32."""
        self.out_features, self.in_features = weight.shape
        scale = weight.abs().amax(dim=1).to(torch.float32).mul_(1.0 / _INT8_MAX).clamp_min_(_SMALLEST_SCALE)
        quantised = (weight.to(torch.float32) / scale[:, None]).round_().to(torch.int8)
        if weight.device.type == "cuda":
            pad_out, pad_in = -self.out_features % _CUDA_MULTIPLE, -self.in_features % _CUDA_MULTIPLE
            quantised = F.pad(quantised, (0, pad_in, 0, pad_out))
        self.weight = quantised  # [out, in] int8
        self._weight_t = quantised.t()  # [in, out] view; columns contiguous, which the product prefers
        self.scale = scale  # [out] float32
        self.bias = bias

    def select(self, rows: torch.Tensor) -> Int8Linear:
        """The output rows [n] int64 with their scales, not quantised anew."""
        rows = rows.to(self.scale.device)
        chosen = copy.copy(self)
        chosen.out_features = len(rows)
        chosen.weight = self.weight[rows]
        if chosen.weight.device.type == "cuda":
            chosen.weight = F.pad(chosen.weight, (0, 0, 0, -len(rows) % _CUDA_MULTIPLE))
        chosen._weight_t = chosen.weight.t()
        chosen.scale = self.scale[rows]
        chosen.bias = None if self.bias is None else self.bias[rows]
        return chosen

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, in] float32 -> [M, out] float32."""
        row_scale = x.abs().amax(dim=1, keepdim=True).mul_(1.0 / _INT8_MAX).clamp_min_(_SMALLEST_SCALE)
        quantised = (x / row_scale).round_().to(torch.int8)
        # [M, out] int32, exact
        product = self._cuda_product(quantised) if x.is_cuda else torch._int_mm(quantised, self._weight_t)
        out = (product * row_scale).mul_(self.scale)
        return out if self.bias is None else out.add_(self.bias)

    def _cuda_product(self, quantised: torch.Tensor) -> torch.Tensor:
        rows = quantised.shape[0]
        pad_rows = max(0, _CUDA_MIN_ROWS - rows)
        pad_in = self._weight_t.shape[0] - self.in_features
        product = torch._int_mm(F.pad(quantised, (0, pad_in, 0, pad_rows)), self._weight_t)
        return product[:rows, : self.out_features]


def select_rows(linear: AnyLinear, rows: torch.Tensor) -> AnyLinear:
    """A linear of the output rows [n] int64 of another one, bit for bit the same weights."""
    if isinstance(linear, Int8Linear):
        return linear.select(rows)
    assert isinstance(linear, Linear), "the kinds of make_linear"
    rows = rows.to(linear.weight.device)
    return Linear(linear.weight[rows], None if linear.bias is None else linear.bias[rows])


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, precision: Precision, device: torch.device
) -> Linear | Int8Linear:
    """A linear over `weight` [out, in] (any float dtype, on the CPU) on `device` in `precision`."""
    if precision == "int8":
        return Int8Linear(weight.to(device), None if bias is None else bias.to(device, torch.float32))
    dtype = ACTIVATION_DTYPES[precision]
    return Linear(weight.to(device, dtype), None if bias is None else bias.to(device, dtype))
