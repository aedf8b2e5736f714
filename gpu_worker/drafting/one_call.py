"""Chains and trees in one call of the kernels: nothing comes back between their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpu_worker.draft_tree import DraftTree, tree_of
from gpu_worker.drafting.tree_growth import TreeShape, confidences
from gpu_worker.kernels.draft_trees import GrownTrees, TreeStart
from gpu_worker.kv_pool import PagedPool
from gpu_worker.request_state import RequestTable
from gpu_worker.sampling.sampler import PlainDraws

Grow = Callable[[TreeStart, Any], GrownTrees]  # with the pool of the drafter's KV


def drafts_in_one_call(
    table: RequestTable,
    grow: Grow,
    pool: PagedPool,
    slots: list[int],
    budgets: list[int],
    shape: TreeShape,
    draws: PlainDraws,
    normed: torch.Tensor,
    recycled: torch.Tensor | None,
) -> DraftTree:
    """tree_growth.grow_trees for slots whose drafts are ranked as `draws` says.

    normed, recycled [R, h]: the outputs of head or model at each last known token; None where nothing is recycled.
    """
    lengths = table.num_tokens[slots]
    nodes = np.array(budgets, dtype=np.int32)
    num_pages = np.minimum(-(-(lengths + nodes) // table.page_size), table.num_pages[slots])
    indptr = np.zeros(len(slots) + 1, dtype=np.int32)
    np.cumsum(num_pages, out=indptr[1:])
    pages = [table.pages[slot, :count] for slot, count in zip(slots, num_pages, strict=True)]
    start = TreeStart(
        hidden=recycled,
        normed=normed,
        page_size=table.page_size,
        lengths=lengths.astype(np.int32),
        page_indptr=indptr,
        page_indices=np.concatenate(pages).astype(np.int32),
        budgets=nodes,
        max_depth=shape.max_depth,
        max_children=shape.max_children,
        least_value=shape.least_value,
        temperatures=draws.temperatures,
        seeds=draws.seeds,
    )
    grown = grow(start, pool)
    roots = table.last_tokens(np.array(slots, dtype=np.int64)).tolist()
    sure = [confidences(*of) for of in zip(grown.parents, grown.values, strict=True)]
    return tree_of(roots, grown.tokens, grown.parents, table.device, sure)
