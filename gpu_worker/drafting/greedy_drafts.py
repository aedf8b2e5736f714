"""Greedy chains and trees in one call of a head that can do that: nothing comes back between the steps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.draft_tree import DraftTree, tree_of
from gpu_worker.drafting.tree_growth import TreeShape, confidences
from gpu_worker.kernels.draft_head import ChainStart, TreeStart
from gpu_worker.kv_pool import PagedPool
from gpu_worker.models.heads.base import DraftsInOneCall, HeadRows, target_ids
from gpu_worker.request_state import Int64Array, RequestTable


def greedy_chains(
    table: RequestTable,
    head: DraftsInOneCall,
    pool: PagedPool,
    slots: list[int],
    counts: list[int],
    state: HeadRows,
) -> list[list[int]]:
    """counts[d] >= 1 draft tokens for each slot; state [D, h]: the head's outputs at each last known token."""
    first = target_ids(head.token_ids, head.output.argmax(state.normed))  # [D]
    steps = np.array(counts, dtype=np.int32) - 1
    if not steps.any():
        return [[token] for token in first.tolist()]
    lengths = table.num_tokens[slots]
    # Step s runs the token at index length + s; a sequence's last draft token is never run.
    page_indptr, page_indices = _pages(table, slots, lengths + steps)
    start = ChainStart(
        input_ids=first.contiguous(),
        hidden=state.recycled.contiguous(),
        positions=torch.from_numpy(lengths),
        page_size=table.page_size,
        kv_lens=(lengths + 1).astype(np.int32),
        page_indptr=page_indptr,
        page_indices=page_indices,
        counts=steps,
    )
    rest = head.chain(start, pool).tolist()
    return [
        [token, *row[:count]] for token, row, count in zip(first.tolist(), rest, steps.tolist(), strict=True)
    ]


def greedy_trees(
    table: RequestTable,
    head: DraftsInOneCall,
    pool: PagedPool,
    slots: list[int],
    budgets: list[int],
    shape: TreeShape,
    state: HeadRows,
) -> DraftTree:
    """tree_growth.grow_trees for dynamic trees of slots that take the head's best ids as they are."""
    lengths = table.num_tokens[slots]
    nodes = np.array(budgets, dtype=np.int32)
    page_indptr, page_indices = _pages(table, slots, lengths + nodes)
    start = TreeStart(
        hidden=state.recycled.contiguous(),
        normed=state.normed.contiguous(),
        page_size=table.page_size,
        lengths=lengths.astype(np.int32),
        page_indptr=page_indptr,
        page_indices=page_indices,
        budgets=nodes,
        max_depth=shape.max_depth,
        max_children=shape.max_children,
    )
    grown = head.tree(start, pool)
    roots = [int(table.known(slot)[-1]) for slot in slots]
    sure = [confidences(*of) for of in zip(grown.parents, grown.values, strict=True)]
    return tree_of(roots, grown.tokens, grown.parents, table.device, sure)


def _pages(
    table: RequestTable, slots: list[int], num_tokens: Int64Array
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(indptr [D + 1], indices) of the pages that hold the first num_tokens [D] tokens of each slot."""
    num_pages = -(-num_tokens // table.page_size)
    indptr = np.zeros(len(slots) + 1, dtype=np.int32)
    np.cumsum(num_pages, out=indptr[1:])
    pages = [table.pages[slot, :count] for slot, count in zip(slots, num_pages, strict=True)]
    return indptr, np.concatenate(pages).astype(np.int32)
