"""Turns rows of sequences into the ForwardBatch of one model; used for the target and for draft models alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.forward_batch import AttentionMetadata, ForwardBatch
from gpu_worker.request_state import RequestTable


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
    tree_mask: torch.Tensor | None = None  # [num_rows, num_rows] bool

    @property
    def num_rows(self) -> int:
        return self.num_known + len(self.extra_ids)


def build_forward_batch(table: RequestTable, rows: Sequence[SequenceRows]) -> ForwardBatch:
    """The inputs of one forward pass over `rows`, request by request in the given order."""
    counts = np.array([row.num_rows for row in rows], dtype=np.int64)
    qo_indptr = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=qo_indptr[1:])
    total = int(qo_indptr[-1])
    slots = np.repeat(np.array([row.slot for row in rows], dtype=np.int64), counts)
    starts = np.array([row.first for row in rows], dtype=np.int64)
    # where each row's KV goes, counted in tokens of its sequence: contiguous from `first` on
    indices = np.arange(total, dtype=np.int64) + np.repeat(starts - qo_indptr[:-1], counts)
    kv_lens = (starts + counts).astype(np.int32)
    positions = indices
    extra_rows: list[int] = []
    extra_ids: list[int] = []
    if any(row.extra_ids for row in rows):
        positions = indices.copy()
        for b, row in enumerate(rows):
            if row.extra_ids:
                begin, end = int(qo_indptr[b]) + row.num_known, int(qo_indptr[b + 1])
                positions[begin:end] = row.extra_positions
                extra_rows += range(begin, end)
                extra_ids += row.extra_ids
    device = table.device
    slots_t = torch.from_numpy(slots).to(device)
    indices_t = torch.from_numpy(indices).to(device)
    input_ids = table.device_tokens[slots_t, indices_t]
    if extra_rows:
        input_ids[torch.tensor(extra_rows, device=device)] = torch.tensor(extra_ids, device=device)
    page_size = table.page_size
    num_pages = -(-kv_lens // page_size)
    page_indptr = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(num_pages, out=page_indptr[1:])
    page_indices = np.concatenate(
        [table.pages[row.slot, :n] for row, n in zip(rows, num_pages, strict=True)]
    ).astype(np.int32)
    return ForwardBatch(
        input_ids=input_ids,
        positions=torch.from_numpy(positions).to(device),
        out_slots=table.kv_slots(slots_t, indices_t),
        attention=AttentionMetadata(
            page_size=page_size,
            qo_indptr=qo_indptr,
            kv_lens=kv_lens,
            page_indptr=page_indptr,
            page_indices=page_indices,
            tree_masks=tuple(row.tree_mask for row in rows),
        ),
    )
