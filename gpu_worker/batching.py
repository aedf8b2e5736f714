"""Turns rows of sequences into the ForwardBatch of one model; used for the target and for draft models alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.forward_batch import AttentionMetadata, ForwardBatch
from gpu_worker.request_state import RequestTable
from gpu_worker.transfers import to_device


@dataclass(frozen=True)
class SequenceRows:
    """Rows of one sequence in a forward pass: its tokens first .. first + num_known - 1, then `extra_ids`.

    extra_ids are tokens that are not (yet) part of the sequence: draft tokens behind its last known token. Their KV
    goes to the slots behind; their rotary positions are given by extra_positions (a tree repeats positions).
    """

    slot: int
    first: int
    num_known: int
    extra_ids: tuple[int, ...] = ()
    extra_positions: tuple[int, ...] = ()
    tree_mask: torch.Tensor | None = None  # [num_rows, num_rows] bool, on the host

    @property
    def num_rows(self) -> int:
        return self.num_known + len(self.extra_ids)


def build_forward_batch(table: RequestTable, rows: Sequence[SequenceRows]) -> ForwardBatch:
    """The inputs of one forward pass over `rows`, request by request in the given order."""
    if len(rows) == 1:
        return _of_one(table, rows[0])
    counts = np.array([row.num_rows for row in rows], dtype=np.int64)
    starts = np.array([row.first for row in rows], dtype=np.int64)
    request_slots = np.array([row.slot for row in rows], dtype=np.int64)
    qo_indptr = _indptr(counts)
    # where each row's KV goes, counted in tokens of its sequence: contiguous from `first` on
    slots = np.repeat(request_slots, counts)
    indices = np.arange(qo_indptr[-1], dtype=np.int64) + np.repeat(starts - qo_indptr[:-1], counts)
    positions, input_ids = indices, table.tokens[slots, indices]
    if any(row.extra_ids for row in rows):
        positions = indices.copy()
        for row, end in zip(rows, qo_indptr[1:].tolist(), strict=True):
            begin = end - len(row.extra_ids)
            positions[begin:end] = row.extra_positions
            input_ids[begin:end] = row.extra_ids
    kv_lens = starts + counts
    num_pages = -(-kv_lens // table.page_size)
    pages = table.pages[request_slots, : num_pages.max(initial=0)]  # [B, most pages]
    listed = np.arange(pages.shape[1]) < num_pages[:, None]
    device = table.device
    return ForwardBatch(
        input_ids=to_device(input_ids, device),
        positions=to_device(positions, device),
        out_slots=to_device(table.kv_slots(slots, indices), device),
        attention=AttentionMetadata(
            page_size=table.page_size,
            qo_indptr=qo_indptr,
            kv_lens=kv_lens.astype(np.int32),
            page_indptr=_indptr(num_pages),
            page_indices=pages[listed],
            tree_masks=tuple(row.tree_mask for row in rows),
        ),
    )


def _of_one(table: RequestTable, row: SequenceRows) -> ForwardBatch:
    """The same for a single sequence, with a third of the operations: alone, a request waits for each of them."""
    num_rows, size, device = row.num_rows, table.page_size, table.device
    end = row.first + num_rows
    # Views: nobody writes to what a pass reads.
    input_ids = table.tokens[row.slot, row.first : end]
    positions = table.position_run(row.first, num_rows)
    if row.extra_ids:
        input_ids, positions = input_ids.copy(), positions.copy()
        input_ids[row.num_known :] = row.extra_ids
        positions[row.num_known :] = row.extra_positions
    num_pages = -(-end // size)
    sizes = np.array((0, num_rows, end, 0, num_pages), dtype=np.int32)
    return ForwardBatch(
        input_ids=to_device(input_ids, device),
        positions=to_device(positions, device),
        out_slots=to_device(table.kv_run(row.slot, row.first, num_rows), device),
        attention=AttentionMetadata(
            page_size=size,
            qo_indptr=sizes[:2],
            kv_lens=sizes[2:3],
            page_indptr=sizes[3:],
            page_indices=table.pages[row.slot, :num_pages],
            tree_masks=(row.tree_mask,),
        ),
    )


def hide_first_token(batch: ForwardBatch, table: RequestTable, rows: Sequence[SequenceRows]) -> ForwardBatch:
    """The same pass with every sequence's first token out of sight, as its keys never existed.

    The keys that are left begin in the middle of a page, so each slot is named as a page of one token: the pool must
    have been made with page_size 1. No row may be a first token.
    """
    assert all(row.first > 0 for row in rows), "a hidden token has no row"
    counts = batch.attention.kv_lens.astype(np.int64) - 1
    page_indptr = _indptr(counts)
    owners = np.repeat(np.array([row.slot for row in rows], dtype=np.int64), counts)
    places = np.arange(len(owners), dtype=np.int64) - np.repeat(page_indptr[:-1], counts) + 1
    attention = replace(
        batch.attention,
        page_size=1,
        kv_lens=counts.astype(np.int32),
        page_indptr=page_indptr,
        page_indices=table.kv_slots(owners, places).astype(np.int32),
    )
    return replace(batch, attention=attention)


def _indptr(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """[n + 1] where each of n runs begins, and where the last ends."""
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr
