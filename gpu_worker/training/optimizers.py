"""The optimizers of one fit: Muon for a head's matrices or AdamW for everything, stepped and stored as one."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gpu_worker.training.parallel import sharded_like

OptimizerKind = Literal["muon", "adamw"]
OPTIMIZER_KINDS: tuple[OptimizerKind, ...] = ("muon", "adamw")

# Peak learning rates that learned fastest of those tried (README.md).
PEAK_RATES: dict[OptimizerKind, float] = {"muon": 5e-3, "adamw": 1e-3}
_ADAM_RATE_BESIDE_MUON = 0.2  # of Muon's: for norms, biases and output rows


class ShardedMuon(torch.optim.Muon):
    """Muon over DTensors: momentum is a shard, like the parameter; a matrix is whole only while it is orthogonalised.

    Every process orthogonalises every matrix, as replicas do, one after the other.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; closure is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state, weight = self.state[parameter], group["momentum"]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                state["momentum_buffer"].lerp_(gradient, 1 - weight)
                mixed = gradient.lerp(state["momentum_buffer"], weight)
                update = _orthogonalised(mixed.full_tensor(), group)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(sharded_like(update, parameter))


def _orthogonalised(whole: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """The update that torch's Muon makes of a gradient: what a step without momentum and decay adds to zero."""
    update = nn.Parameter(torch.zeros_like(whole))
    update.grad = whole
    same = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([update], weight_decay=0.0, momentum=0.0, nesterov=False, **same).step()  # type: ignore[no-untyped-call]
    return update.detach()


class Optimizers:
    """Muon (https://kellerjordan.github.io/posts/muon/) needs matrices that mix features; the others take AdamW.

    Muon's update has all its singular values near one, so that a head which starts from random weights soon uses all
    directions of its input instead of the loudest few; with the scale of `match_rms_adamw` (arXiv 2502.16982, section
    2.2) its rates and weight decay mean what AdamW's do.
    """

    def __init__(self, module: nn.Module, kind: OptimizerKind, peak_rate: float, weight_decay: float) -> None:
        """module: its parameters that ask for a gradient are stepped."""
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        # An output row belongs to one id: a table, not a mix of features.
        mixing = [p for name, p in named if p.dim() == 2 and not name.endswith("lm_head.weight")]
        if kind == "adamw":
            mixing = []
        chosen = {id(p) for p in mixing}
        others = [p for p in self.parameters if id(p) not in chosen]
        self._parts: list[torch.optim.Optimizer] = []
        rate = peak_rate
        if mixing:
            muon = ShardedMuon if isinstance(mixing[0], DTensor) else torch.optim.Muon
            self._parts.append(
                muon(mixing, lr=peak_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )
            rate *= _ADAM_RATE_BESIDE_MUON
        # Norm weights and biases are not decayed: they have no scale to keep small.
        groups = [
            {"params": [p for p in others if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if groups:
            self._parts.append(torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True))
        self._peaks = [[group["lr"] for group in part.param_groups] for part in self._parts]

    def set_rate(self, share: float) -> None:
        """Sets every group to this share of its own peak."""
        for part, peaks in zip(self._parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * share

    @property
    def rate(self) -> float:
        """The learning rate of the first group, for the log."""
        return float(self._parts[0].param_groups[0]["lr"])

    def step(self) -> None:
        """One update from the gradients that are there."""
        for part in self._parts:
            part.step()

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """For a checkpoint; under FSDP with DTensors in it."""
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """From a checkpoint of the same module and kind, whose tensors are whole."""
        for part, of in zip(self._parts, state, strict=True):
            parameters = [p for group in part.param_groups for p in group["params"]]
            shards = {
                index: {name: sharded_like(value, parameters[index]) for name, value in values.items()}
                for index, values in of["state"].items()
            }
            part.load_state_dict({**of, "state": shards})
