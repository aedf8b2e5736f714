"""A tree of settled shape: its nodes are the draft's candidates of the ranks that the shape names."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gpu_worker.batching import SequenceRows
from gpu_worker.drafting.tree_growth import TreeShape, grow_trees
from gpu_worker.drafting.tree_shape import build_product_tree
from gpu_worker.models.heads.base import HeadRows
from gpu_worker.request_state import RequestTable
from shared_mem.records import Admission, SamplingRecord

RATES = [[0.6, 0.2, 0.1], [0.5, 0.3], [0.4]]


class _Candidates:
    """Whatever the path, the children of a token t are 10 t + 1, 10 t + 2, ...; the third has no probability."""

    def children(
        self, normed: torch.Tensor, slots: list[int], positions: list[int], paths: list[list[int]], count: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        last = [path[-1] if path else 0 for path in paths]
        log_probs = [-1.0, -2.0, -torch.inf, *[-3.0] * count][:count]
        return [[10 * token + rank + 1 for rank in range(count)] for token in last], [log_probs] * len(paths)


class _Ranked(_Candidates):
    """The same children, every one of them possible."""

    def children(
        self, normed: torch.Tensor, slots: list[int], positions: list[int], paths: list[list[int]], count: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        tokens, _ = super().children(normed, slots, positions, paths, count)
        return tokens, [[-0.1 * (rank + 1) for rank in range(count)]] * len(paths)


def _expand(rows: list[SequenceRows], recycled: torch.Tensor) -> HeadRows:
    return HeadRows(recycled, recycled)


def test_the_nodes_are_those_of_the_shape() -> None:
    fixed = build_product_tree(RATES, 7)
    table = RequestTable(2, 64, 16, torch.device("cpu"))
    for slot, ids in enumerate(([5, 6, 7], [8])):
        token_ids = np.array(ids, dtype=np.int32)
        table.admit(Admission(slot, 1, token_ids, len(ids), 0, 0, SamplingRecord()))
    state = HeadRows(torch.zeros(2, 4), torch.zeros(2, 4))
    shape = TreeShape(max_depth=3, fixed=fixed)
    tree = grow_trees(table, [0, 1], [7, 2], shape, state, _expand, _Candidates())  # type: ignore[arg-type]
    for request, budget in ((0, 7), (1, 2)):
        begin, end = tree.indptr[request], tree.indptr[request + 1]
        tokens = tree.tokens[begin:end].tolist()[1:]
        # the third candidate of the first level is impossible here, so its place stays empty
        paths = [path for path in fixed.best(budget).paths() if 2 not in path]
        expected = [int("".join(str(rank + 1) for rank in path)) for path in paths]
        assert sorted(tokens) == sorted(expected)
        assert tree.depths[begin:end].tolist()[1:] == sorted(len(path) for path in paths)


def test_a_fixed_shape_leaves_out_what_is_worth_too_little_in_a_step() -> None:
    table = RequestTable(1, 64, 16, torch.device("cpu"))
    table.admit(Admission(0, 1, np.array([5, 6], dtype=np.int32), 2, 0, 0, SamplingRecord()))
    state = HeadRows(torch.zeros(1, 4), torch.zeros(1, 4))
    shape = TreeShape(max_depth=3, fixed=build_product_tree(RATES, 7), least_value=-2.5)
    tree = grow_trees(table, [0], [7], shape, state, _expand, _Candidates())  # type: ignore[arg-type]
    assert sorted(tree.tokens.tolist()[1:]) == [1, 2, 11]


@pytest.mark.parametrize(
    ("rates", "budgets", "expected"),
    [
        ([[0.2, 0.1, 0.5]], [1], [[3]]),
        ([[0.02] * 10 + [0.5]], [1], [[11]]),
        ([[0.2, 0.1, 0.5], [0.1, 0.6]], [1, 2], [[3], [3, 32]]),
        ([[0.0]], [2], [[]]),
    ],
    ids=["the third", "behind more than a dynamic tree's children", "of two budgets", "none ever hits"],
)
def test_a_fixed_shape_may_want_a_candidate_without_those_before_it(
    rates: list[list[float]], budgets: list[int], expected: list[list[int]]
) -> None:
    table = RequestTable(2, 64, 16, torch.device("cpu"))
    slots = range(len(budgets))
    for slot in slots:
        table.admit(Admission(slot, 1, np.array([5, 6], dtype=np.int32), 2, 0, 0, SamplingRecord()))
    state = HeadRows(torch.zeros(len(budgets), 4), torch.zeros(len(budgets), 4))
    shape = TreeShape(max_depth=3, fixed=build_product_tree(rates, 64))
    tree = grow_trees(table, slots, budgets, shape, state, _expand, _Ranked())  # type: ignore[arg-type]
    assert [tree.tokens[tree.indptr[r] + 1 : tree.indptr[r + 1]].tolist() for r in slots] == expected


@pytest.mark.parametrize(
    ("least", "expected"),
    [(-math.inf, [1, 2, 11, 12, 21, 22, 111]), (-2.5, [1, 2, 11]), (-0.5, [])],
    ids=["all", "some", "none"],
)
def test_nodes_that_are_worth_too_little_are_left_out(least: float, expected: list[int]) -> None:
    """Nor are they drafted on: 21 is worth -3, as 111 and 12 are."""
    table = RequestTable(1, 64, 16, torch.device("cpu"))
    table.admit(Admission(0, 1, np.array([5, 6], dtype=np.int32), 2, 0, 0, SamplingRecord()))
    state = HeadRows(torch.zeros(1, 4), torch.zeros(1, 4))
    expanded: list[int] = []

    def expand(rows: list[SequenceRows], recycled: torch.Tensor) -> HeadRows:
        expanded.extend(rows[0].extra_ids)
        return HeadRows(recycled, recycled)

    shape = TreeShape(max_depth=3, max_children=2, least_value=least)
    tree = grow_trees(table, [0], [7], shape, state, expand, _Candidates())  # type: ignore[arg-type]
    assert sorted(tree.tokens.tolist()[1:]) == expected
    assert set(expanded) <= set(expected)
