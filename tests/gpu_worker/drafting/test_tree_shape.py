"""Fixed tree shapes: the optimum of every size, and hit rates as they were measured."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from gpu_worker.drafting.tree_shape import (
    ProductTree,
    build_product_tree,
    measure_hit_rates,
    with_best_chain,
)

RATES = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.05], [0.6, 0.1]]


def best_by_trying_all(rates: list[list[float]], num_nodes: int) -> float:
    """Over all sets of nodes that are closed under parents."""
    nodes = [
        path
        for depth in range(1, len(rates) + 1)
        for path in itertools.product(*(range(len(rates[d])) for d in range(depth)))
    ]
    worth = {path: math.prod(rates[d][rank] for d, rank in enumerate(path)) for path in nodes}
    best = 0.0
    for chosen in itertools.combinations(nodes, num_nodes):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            best = max(best, sum(worth[path] for path in chosen))
    return best


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
def test_greedy_is_optimal(num_nodes: int) -> None:
    tree = build_product_tree(RATES, num_nodes)
    assert tree.num_nodes == num_nodes
    assert tree.expected_accepted == pytest.approx(best_by_trying_all(RATES, num_nodes))


def test_nodes_by_hand() -> None:
    tree = build_product_tree(RATES, 6)
    # 0.5; 0.5 * 0.4; 0.2; 0.5 * 0.3; 0.2 * 0.6; 0.1: of equal values the shallower comes first
    assert tree.paths() == [(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (2,)]
    assert tree.parents == (-1, -1, 0, 0, 2, -1)
    assert tree.depths == (1, 1, 2, 2, 3, 1)
    assert tree.probabilities == pytest.approx((0.5, 0.2, 0.2, 0.15, 0.12, 0.1))
    assert tree.widths == (3, 2, 1)


def test_prefix_is_the_best_smaller_tree() -> None:
    whole = build_product_tree(RATES, 12)
    for size in range(13):
        assert whole.best(size) == build_product_tree(RATES, size)


def test_depth_can_be_cut() -> None:
    cut = build_product_tree(RATES, 30).best(5, max_depth=2)
    assert cut == build_product_tree(RATES[:2], 5)


def test_parents_come_first_and_own_lower_ranks_too() -> None:
    rng = np.random.default_rng(3)
    rates = [sorted(rng.dirichlet(np.ones(6))[:5].tolist(), reverse=True) for _ in range(4)]
    tree = build_product_tree(rates, 40)
    paths = tree.paths()
    for i, path in enumerate(paths):
        assert len(path) == 1 or path[:-1] in paths[:i]
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths[:i]
    assert list(tree.probabilities) == sorted(tree.probabilities, reverse=True)


def test_a_lower_rank_that_hits_more_often_comes_first() -> None:
    assert build_product_tree([[0.1, 0.6]], 1).ranks == (1,)


def test_candidates_that_never_hit_get_no_node() -> None:
    assert build_product_tree([[0.5, 0.0], [0.0]], 9).paths() == [(0,)]
    assert build_product_tree([], 9) == ProductTree((), (), (), ())
    assert build_product_tree([], 9).widths == ()


@pytest.mark.parametrize(
    ("rates", "match"),
    [
        ([[0.5, -0.1]], "depth 1, rank 1 is -0.1"),
        ([[0.5], [math.nan]], "depth 2, rank 0 is nan"),
        ([[0.8, 0.4]], "depth 1 sums to 1.2"),
    ],
)
def test_what_is_no_rate_is_refused(rates: list[list[float]], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build_product_tree(rates, 3)


def test_measured_rates_count_only_what_was_reached() -> None:
    ranks = np.array([[0, 1], [0, 7], [1, -1], [9, -1]])
    assert measure_hit_rates(ranks, 3) == [[0.5, 0.25, 0.0], [0.0, 0.5, 0.0]]
    assert measure_hit_rates(np.full((2, 1), -1), 2) == [[0.0, 0.0]]


def test_expected_length_is_what_a_walk_accepts() -> None:
    rng = np.random.default_rng(5)
    tree = build_product_tree(RATES, 9)
    paths, accepted = set(tree.paths()), 0
    columns = [rng.choice(len(rates) + 1, size=8000, p=[*rates, 1 - sum(rates)]) for rates in RATES]
    for ranks in np.stack(columns, axis=1).tolist():
        accepted += next((d for d in range(3) if tuple(ranks[: d + 1]) not in paths), 3)
    assert accepted / 8000 == pytest.approx(tree.expected_accepted, abs=0.04)


def test_the_chain_of_first_candidates_is_added_where_it_is_missing() -> None:
    rates = [[0.3] * 3, [0.2] * 3, [0.01, 0.0], [0.01, 0.0]]
    tree = build_product_tree(rates, 6)
    longer = with_best_chain(tree, rates)
    assert (0, 0, 0) not in tree.paths()
    assert longer.paths()[: tree.num_nodes] == tree.paths()
    assert {(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)} <= set(longer.paths())
    assert longer.num_nodes == len(set(longer.paths()))
    assert longer.probabilities[-1] == pytest.approx(0.3 * 0.2 * 0.01 * 0.01)
    assert with_best_chain(longer, rates) == longer
