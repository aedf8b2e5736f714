"""Draws with counter-based noise on the CPU kernels: the noise of gpu_worker/sampling/random.py, never stored.

Noise for a whole vocabulary costs more in torch than the model's own step. Here nearly every id is ruled out by a bound
on its noise before any logarithm is taken.
"""

from __future__ import annotations

import torch

from gpu_worker.kernels.native import KernelError, ThreadTeam, pointer

MAX_DRAWS = 64


def gumbel_topk(
    team: ThreadTeam, weights: torch.Tensor, keys: torch.Tensor, count: int, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(columns [n, count] int64, weight + noise [n, count]) of the largest sums, best first, ties by column.

    weights [n, K] float32, log p up to a constant per row (-inf: removed); keys [n] int64; ids [n, K] int64, or None:
    column c is id c. Raises KernelError unless 1 <= count <= min(K, MAX_DRAWS).
    """
    n, width = weights.shape
    if not 1 <= count <= min(width, MAX_DRAWS):
        raise KernelError(f"count: {count} of {width} columns, at most {MAX_DRAWS}")
    columns = torch.empty(n, count, dtype=torch.int64)
    values = torch.empty(n, count)
    weights = weights.contiguous()
    names = None if ids is None else ids.contiguous()
    team.kernels.call(
        "dl_gumbel_topk",
        team.handle.address,
        pointer("weights", weights, torch.float32, (n, width)),
        None if names is None else pointer("ids", names, torch.int64, (n, width)),
        pointer("keys", keys.contiguous(), torch.int64, (n,)),
        n,
        width,
        count,
        columns.data_ptr(),
        values.data_ptr(),
    )
    return columns, values
