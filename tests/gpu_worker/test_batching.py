"""What one sequence's pass reads is what it reads among others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker.batching import SequenceRows, build_forward_batch
from gpu_worker.request_state import RequestTable
from shared_mem.records import Admission, PageUpdate, SamplingRecord

_PAGE, _CONTEXT = 4, 30


@pytest.fixture
def table() -> RequestTable:
    table = RequestTable(2, _CONTEXT, _PAGE, torch.device("cpu"))
    for slot, pages in enumerate(([5, 2, 9, 0], [1, 3])):
        ids = np.arange(100 * slot, 100 * slot + 14, dtype=np.int32)
        table.admit(Admission(slot, 1, ids, 5, 0, 0, SamplingRecord()))
        table.set_pages(PageUpdate(slot, 0, np.array(pages[:2], dtype=np.int32)))
        table.set_pages(PageUpdate(slot, 2, np.array(pages[2:], dtype=np.int32)))
    return table


@pytest.mark.parametrize(
    "row",
    [
        SequenceRows(0, 0, 1),
        SequenceRows(0, 3, 7),
        SequenceRows(0, 13, 1, (7, 8), (14, 15)),
        SequenceRows(0, 12, 2, (7, 8), (14, 14), torch.eye(4, dtype=torch.bool)),
    ],
)
def test_a_sequence_alone_and_among_others(row: SequenceRows, table: RequestTable) -> None:
    alone = build_forward_batch(table, [row])
    among = build_forward_batch(table, [row, SequenceRows(1, 2, 3)])
    n, meta, others = row.num_rows, alone.attention, among.attention
    for name in ("input_ids", "positions", "out_slots"):
        assert getattr(alone, name).tolist() == getattr(among, name)[:n].tolist()
    assert alone.num_rows == n == meta.qo_indptr[1] == others.qo_indptr[1]
    assert meta.kv_lens.tolist() == others.kv_lens[:1].tolist() == [row.first + n]
    pages = int(meta.page_indptr[1])
    assert pages == others.page_indptr[1] == -(-(row.first + n) // _PAGE)
    assert meta.page_indices.tolist() == others.page_indices[:pages].tolist() == [5, 2, 9, 0][:pages]
    for array in (meta.qo_indptr, meta.kv_lens, meta.page_indptr, meta.page_indices):
        assert array.dtype == np.int32
    assert meta.tree_masks == (row.tree_mask,)


def test_slots_of_positions_follow_the_pages(table: RequestTable) -> None:
    positions = np.arange(16)
    slots = np.array([5, 2, 9, 0])[positions // _PAGE] * _PAGE + positions % _PAGE
    assert table.kv_slots(0, positions).tolist() == table.kv_run(0, 0, 16).tolist() == slots.tolist()
    assert table.kv_slots(np.array([0, 1]), np.array([9, 5])).tolist() == [37, 13]
    table.set_pages(PageUpdate(0, 1, np.array([7], dtype=np.int32)))
    assert table.kv_run(0, 4, 4).tolist() == [28, 29, 30, 31]


def test_no_token_is_lost_at_the_end_of_the_table(table: RequestTable) -> None:
    table.append_each(np.array([0]), [list(range(_CONTEXT + 1 - 14))])
    with pytest.raises(AssertionError, match="context limit"):
        table.append_each(np.array([0]), [[1]])
