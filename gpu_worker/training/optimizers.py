"""The optimizers of one fit: Muon for a head's matrices or AdamW for everything, stepped and stored as one."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from gpu_worker.training.muon import Muon
from gpu_worker.training.parallel import sharded_like

OptimizerKind = Literal["muon", "adamw"]
OPTIMIZER_KINDS: tuple[OptimizerKind, ...] = ("muon", "adamw")

# Peak learning rates that learned fastest of those tried (README.md).
PEAK_RATES: dict[OptimizerKind, float] = {"muon": 5e-3, "adamw": 1e-3}
_ADAM_RATE_BESIDE_MUON = 0.2  # of Muon's: for norms, biases and output rows


class Optimizers:
    """Muon needs matrices that mix features; the others take AdamW.

    Muon's update has all its singular values near one, so that a head which starts from random weights soon uses all
    directions of its input instead of the loudest few; its rates and weight decay mean what AdamW's do.
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
            self._parts.append(Muon(mixing, lr=peak_rate, weight_decay=weight_decay))
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
