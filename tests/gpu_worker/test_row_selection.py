"""Rows by number, whether they follow each other or not."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.row_selection import put_rows, take_rows


@pytest.mark.parametrize("rows", [[2], [1, 2, 3], [3, 1], [0, 2], []])
def test_rows_are_taken_and_put(rows: list[int]) -> None:
    source = torch.arange(12.0).view(4, 3)
    assert torch.equal(take_rows(source, rows), source[torch.tensor(rows, dtype=torch.int64)])
    target, expected = torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(4, 3, dtype=torch.bfloat16)
    values = torch.arange(3.0 * len(rows)).view(len(rows), 3) + 1
    put_rows(target, rows, values)
    for row, value in zip(rows, values, strict=True):
        expected[row] = value
    assert torch.equal(target, expected)
