"""Greedy chains of several sequences in one call of a head that can do that: nothing comes back between the steps."""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.kernels.draft_head import ChainStart
from gpu_worker.kv_pool import PagedPool
from gpu_worker.models.heads.base import ChainsInOneCall, DraftHead, HeadRows, target_ids
from gpu_worker.request_state import RequestTable


def greedy_chains(
    table: RequestTable,
    head: DraftHead,
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
    assert isinstance(head, ChainsInOneCall), "the caller asked"
    lengths = table.num_tokens[slots]
    # Step s runs the token at index length + s; a sequence's last draft token is never run.
    num_pages = -(-(lengths + steps) // table.page_size)
    page_indptr = np.zeros(len(slots) + 1, dtype=np.int32)
    np.cumsum(num_pages, out=page_indptr[1:])
    pages = [table.pages[slot, :count] for slot, count in zip(slots, num_pages, strict=True)]
    start = ChainStart(
        input_ids=first.contiguous(),
        hidden=state.recycled.contiguous(),
        positions=torch.from_numpy(lengths),
        page_size=table.page_size,
        kv_lens=(lengths + 1).astype(np.int32),
        page_indptr=page_indptr,
        page_indices=np.concatenate(pages).astype(np.int32),
        counts=steps,
    )
    rest = head.chain(start, pool).tolist()
    return [
        [token, *row[:count]] for token, row, count in zip(first.tolist(), rest, steps.tolist(), strict=True)
    ]
