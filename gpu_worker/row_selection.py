"""Rows of a tensor by number, on the worker's hot path: mostly a run of them, which needs no copy. A leaf module."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.transfers import to_device


def take_rows(source: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """source [N, ...] at `rows`: a view where they follow each other, else a copy. Do not write to it."""
    if _is_run(rows):
        return source.narrow(0, rows[0], len(rows))
    return source.index_select(0, _index(rows, source.device))


def put_rows(target: torch.Tensor, rows: Sequence[int], values: torch.Tensor) -> None:
    """Writes values [n, ...] to target [N, ...] at `rows`, which are distinct; in target's dtype."""
    if _is_run(rows):
        target.narrow(0, rows[0], len(rows)).copy_(values)
    else:
        target.index_copy_(0, _index(rows, target.device), values.to(target.dtype))


def _is_run(rows: Sequence[int]) -> bool:
    count = len(rows)
    return count == 1 or (count > 1 and list(rows) == list(range(rows[0], rows[0] + count)))


def _index(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array(rows, dtype=np.int64), device)
