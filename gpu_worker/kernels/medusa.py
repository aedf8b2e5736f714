"""Medusa's heads on the CPU kernels (arXiv 2401.10774, section 2.1): residual blocks, and what is drafted from them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.kernels.decoder import address_of
from gpu_worker.kernels.linear import PackedLinear
from gpu_worker.kernels.native import ThreadTeam, pointer


def residual_blocks(
    linear: PackedLinear, team: ThreadTeam, x: torch.Tensor, activation_group: int = 32
) -> torch.Tensor:
    """x + SiLU(W x + b), of several heads in one call.

    linear holds the heads' W [h, h], one below the other, with their biases: [n * h, h]. x [M, h] float32 gives
    [M, n, h]. A row's bits do not depend on the other rows, which torch's SiLU does not promise.

    Raises KernelError unless linear's out_features are a multiple of its in_features.
    """
    rows, h = len(x), linear.in_features
    address = pointer("x", x, torch.float32, (rows, h))
    out = torch.empty(rows, linear.out_features)
    linear.kernels.call(
        "dl_linear_residual_blocks",
        linear.handle.address,
        team.handle.address,
        int(linear.kernels.isa),
        activation_group,
        address,
        rows,
        out.data_ptr(),
    )
    return out.view(rows, -1, h)


def medusa_candidates(
    linear: PackedLinear,
    lm_head: PackedLinear,
    team: ThreadTeam,
    x: torch.Tensor,
    num_heads: int,
    count: int,
    target_ids: torch.Tensor | None = None,
    activation_group: int = 32,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The likeliest ids of the first num_heads heads, best first, and their log-probabilities: [M, num_heads, count].

    `linear` and x [M, h] as in residual_blocks, each head one block; lm_head [columns, h] serves all of them, and
    target_ids [columns] int64 says which ids its columns stand for (None: their own numbers). The same bits as
    residual_blocks and then lm_head.topk.

    Raises KernelError for more heads than linear holds, or a count that is not in 1..64 or above lm_head's columns.
    """
    rows = len(x)
    address = pointer("x", x, torch.float32, (rows, linear.in_features))
    ids_address = None
    if target_ids is not None:
        ids_address = pointer("target_ids", target_ids, torch.int64, (lm_head.out_features,))
    ids = np.empty((rows, num_heads, count), dtype=np.int64)
    values = np.empty((rows, num_heads, count), dtype=np.float32)
    linear.kernels.call(
        "dl_medusa_candidates",
        linear.handle.address,
        lm_head.handle.address,
        team.handle.address,
        int(linear.kernels.isa),
        activation_group,
        address,
        rows,
        num_heads,
        count,
        ids_address,
        address_of(ids),
        address_of(values),
    )
    return ids, values
