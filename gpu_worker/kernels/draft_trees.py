"""Dynamic trees and chains of drafts in one call of the kernels, by draft heads and by whole models."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.kernels.decoder import address_of, check_page_size, int32_array
from gpu_worker.kernels.kv_pool import NativeKVPool
from gpu_worker.kernels.linear import PackedLinear
from gpu_worker.kernels.native import (
    Handle,
    KernelError,
    NativeKernels,
    ThreadTeam,
    TreeOutStruct,
    TreeStruct,
    pointer,
)


@dataclass(frozen=True)
class TreeStart:
    """Where D sequences stand before dynamic trees grow behind them; numpy arrays are int32.

    A tree's rows take the KV slots lengths[d] .. lengths[d] + budgets[d] - 1 of its sequence's pages, which must hold
    them, whatever their depth; a chain (one child a node) needs one less, as its last token is not run.
    """

    hidden: (
        torch.Tensor | None
    )  # [D, h] float32, recycled: the head's output at the last known token; None: a decoder
    normed: torch.Tensor  # [D, h] float32, what the output head reads there
    page_size: int
    lengths: np.ndarray  # [D] known tokens
    page_indptr: np.ndarray  # [D + 1]
    page_indices: np.ndarray  # [page_indptr[D]]
    budgets: np.ndarray  # [D] nodes behind each root, at most
    max_depth: int
    max_children: int  # of one node
    least_value: float  # log-probability below which a node is left out
    # Where the temperature is above 0 children are ranked by log q + coupled noise (sampling/random.py), not by q.
    temperatures: np.ndarray | None = None  # [D] float32; None: all 0
    seeds: np.ndarray | None = None  # [D] int64


@dataclass(frozen=True)
class GrownTrees:
    """Nodes behind the root of each of D sequences, parents first."""

    tokens: list[list[int]]  # target ids
    parents: list[list[int]]  # index among the sequence's nodes; -1: the root
    values: list[list[float]]  # sum of the head's log-probabilities from the root down


def grow(
    kernels: NativeKernels,
    handle: Handle,
    start: TreeStart,
    pool: NativeKVPool,
    team: ThreadTeam,
    lm_head: PackedLinear,
    target_ids: torch.Tensor | None = None,
) -> GrownTrees:
    """Trees of D sequences by the model behind `handle`; with max_children 1 chains, each token the best.

    Best is the most probable, or where `start` has temperatures the one that wins under coupled noise.

    lm_head may have a reduced vocabulary: target_ids [Vd] int64 then gives the target's id of each of its columns. The
    trees are those of drafting/tree_growth.py, whose passes and top-k these are, bit for bit. Raises KernelError for a
    start that names slots or positions that do not exist; nothing has run then.
    """
    check_page_size(start.page_size, pool)
    num_sequences, h = len(start.budgets), start.normed.shape[1]
    arrays = [
        int32_array("lengths", start.lengths, num_sequences),
        int32_array("page_indptr", start.page_indptr, num_sequences + 1),
        int32_array("page_indices", start.page_indices, len(start.page_indices)),
        int32_array("budgets", start.budgets, num_sequences),
    ]
    if int(arrays[1][-1]) > len(arrays[2]):
        raise KernelError(f"page_indptr: ends at {arrays[1][-1]}, there are {len(arrays[2])} pages")
    ids = None
    if target_ids is not None:
        ids = pointer("target_ids", target_ids, torch.int64, (lm_head.out_features,))
    for name, array, dtype in (
        ("temperatures", start.temperatures, np.float32),
        ("seeds", start.seeds, np.int64),
    ):
        if array is not None and (array.shape != (num_sequences,) or array.dtype != dtype):
            raise KernelError(f"{name}: {array.dtype} {list(array.shape)}, expected [{num_sequences}]")
    most = max([0, *arrays[3].tolist()])  # a negative one is for C to refuse
    struct = TreeStruct(
        num_sequences,
        most,
        start.page_size,
        None if start.hidden is None else pointer("hidden", start.hidden, torch.float32, (num_sequences, h)),
        pointer("normed", start.normed, torch.float32, (num_sequences, h)),
        *(address_of(array) for array in arrays),
        None if start.temperatures is None else address_of(start.temperatures),
        None if start.seeds is None else address_of(start.seeds),
        start.max_depth,
        start.max_children,
        start.least_value,
        lm_head.handle.address,
        ids,
    )
    tokens = np.empty((num_sequences, most), dtype=np.int64)
    parents = np.empty((num_sequences, most), dtype=np.int32)
    values = np.empty((num_sequences, most), dtype=np.float64)
    counts = np.empty(num_sequences, dtype=np.int32)
    out = TreeOutStruct(*(address_of(array) for array in (tokens, parents, values, counts)))
    kernels.call(
        "dl_model_tree",
        handle.address,
        team.handle.address,
        pool.handle.address,
        ctypes.byref(struct),
        ctypes.byref(out),
    )
    sizes = counts.tolist()
    return GrownTrees(
        [row[:size] for row, size in zip(tokens.tolist(), sizes, strict=True)],
        [row[:size] for row, size in zip(parents.tolist(), sizes, strict=True)],
        [row[:size] for row, size in zip(values.tolist(), sizes, strict=True)],
    )
