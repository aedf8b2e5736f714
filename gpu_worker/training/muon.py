"""Muon for `optimizers.py`: torch's, computing in what the device multiplies well, and over sharded parameters too."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gpu_worker.layers.linear import ACTIVATION_DTYPES
from gpu_worker.training.parallel import sharded_like
from gpu_worker.weights.loader import resolve_dtype

_SHARE_OF_ADAMW = (
    0.2  # root mean square of AdamW's updates, which the rate is meant for (arXiv 2502.16982, 2.2)
)


class Muon(torch.optim.Muon):
    """https://kellerjordan.github.io/posts/muon/, with torch's options, defaults and state.

    torch always orthogonalises in bfloat16, which a processor without instructions for it does some thirty times
    slower than in float32. Of a DTensor momentum is a shard, like the parameter; a matrix is whole only while it is
    orthogonalised, which every process does for every matrix, as replicas do.
    """

    def __init__(self, parameters: list[nn.Parameter], **options: Any) -> None:
        """parameters: at least one, all matrices on one device; options as torch's Muon has them."""
        super().__init__(parameters, **options)
        self._dtype = ACTIVATION_DTYPES[resolve_dtype("auto", parameters[0].device)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; closure is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state, weight = parameter.grad, self.state[parameter], group["momentum"]
        assert gradient is not None, "checked by step"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - weight)
        mixed = gradient.lerp(momentum, weight) if group["nesterov"] else momentum
        whole = mixed.full_tensor() if isinstance(mixed, DTensor) else mixed
        update = orthogonalised(
            whole.to(self._dtype), group["ns_coefficients"], group["ns_steps"], group["eps"]
        ).float()
        rate = group["lr"] * _SHARE_OF_ADAMW * math.sqrt(max(whole.shape))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(sharded_like(update, parameter), alpha=-rate)


def orthogonalised(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """[m, n] -> [m, n] with the same singular vectors and singular values near one, in the dtype of `matrix`.

    The quintic Newton-Schulz iteration of Muon: X <- a X + (b A + c A A) X with A = X X^T.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # the smaller square is the cheaper one
    x = x / x.norm().clamp_min(eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
