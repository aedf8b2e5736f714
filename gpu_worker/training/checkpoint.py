"""Training state on disk: everything that the next step depends on, in one file that is replaced as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpu_worker.training.errors import TrainingError
from gpu_worker.training.optimizers import Optimizers
from gpu_worker.training.parallel import gathered, sharded_like
from gpu_worker.training.whole_file import whole_file

_FILE = "checkpoint.pt"


@dataclass
class Position:
    """How far a run has come."""

    step: int = 0  # optimizer steps done, skipped ones included
    epoch: int = 0
    batch: int = 0  # of the epoch, next to be read (counted over all ranks)
    rows: int = 0  # law rows seen
    skipped: int = 0  # steps whose loss or gradient was not finite


@dataclass(frozen=True)
class RunData:
    """What a run reads; kept in its checkpoint, so that shards which appear meanwhile change nothing."""

    shards: tuple[str, ...]  # file names
    draft_ids: torch.Tensor  # [V] int64

    @classmethod
    def of(cls, state: dict[str, Any]) -> RunData:
        """As a read checkpoint has it."""
        return cls(tuple(state["shards"]), state["draft_ids"])


def save_checkpoint(
    directory: Path,
    module: nn.Module,
    optimizer: Optimizers,
    position: Position,
    facts: dict[str, Any],
    data: RunData,
    *,
    chief: bool,
) -> None:
    """Called by every process, as a sharded state is gathered from all; the chief writes it whole.

    facts: what must be the same on resuming. No random state: noise is drawn anew from seed, step and rank.
    """
    state = {
        "module": gathered(module.state_dict(), keep=chief),
        "optimizer": gathered(optimizer.state_dict(), keep=chief),
        "position": vars(position),
        "facts": facts,
        "shards": list(data.shards),
        "draft_ids": data.draft_ids,
    }
    if not chief:
        return
    with whole_file(directory / _FILE) as unfinished:
        torch.save(state, unfinished)


def read_checkpoint(directory: Path) -> dict[str, Any] | None:
    """The state that save_checkpoint wrote, or None. Raises TrainingError for a damaged file."""
    path = directory / _FILE
    if not path.exists():
        return None
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        raise TrainingError(f"{path}: cannot be read: {error}") from error


def restore(state: dict[str, Any], module: nn.Module, optimizer: Optimizers) -> Position:
    """Puts a read state back, each process its own shards of it; the position to go on from."""
    mine = module.state_dict()
    module.load_state_dict(
        {
            name: sharded_like(value, mine[name]) if name in mine else value
            for name, value in state["module"].items()
        }
    )
    optimizer.load_state_dict(state["optimizer"])
    return Position(**state["position"])
