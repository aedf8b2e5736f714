"""The portfolio: trees merged by prefixes, the budget to what succeeds, learning from all that was proposed."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_worker.drafting.base import DraftRequest, TargetProgress
from gpu_worker.drafting.success import MAX_DEPTH, MAX_RANKS, SuccessRates
from gpu_worker.drafting.trie import ROOT, DraftTrie, Grade
from tests.gpu_worker.drafting.portfolio_bench import HIDDEN, A, B, Bench, chain


def test_trees_merge_by_common_prefixes() -> None:
    bench = Bench(lambda n: chain(7, 8, 9), lambda n: ([7, 5, 6], [-1, -1, 0]))
    tree = bench.drafter.propose([DraftRequest(0, 8), DraftRequest(1, 8)])
    for request in (0, 1):
        paths = bench.paths(tree, request)
        assert sorted(paths) == [(5,), (7,), (7, 6), (7, 8), (7, 8, 9)]
        assert paths[0] == (7,)  # both agree on it
    assert tree.q is None
    assert tree.tokens[tree.indptr[:-1]].tolist() == [2, 2]
    assert tree.depths.tolist()[: 1 + len(paths)][1:] == [len(path) for path in paths]


def test_budget_keeps_the_best_nodes() -> None:
    bench = Bench(lambda n: chain(7, 8, 9), lambda n: ([7, 5, 6], [-1, -1, 0]))
    for budget in range(1, 5):
        tree = bench.drafter.propose([DraftRequest(0, budget)])
        paths = bench.paths(tree)
        assert len(paths) <= budget
        assert all(len(path) == 1 or path[:-1] in paths for path in paths)
    assert bench.drafter.propose([DraftRequest(0, 0)]).num_nodes == 1


def test_budget_goes_to_the_part_that_succeeds() -> None:
    """A is always right, B never: B's nodes vanish, and B is no longer asked but for probes."""
    bench = Bench(lambda n: chain(3, 3, 3, 3), lambda n: chain(4, 4, 4, 4), probe_interval=16)
    for _ in range(60):
        bench.step([3, 3, 3, 3, 3])
    tree = bench.step([3, 3, 3, 3, 3])
    assert bench.paths(tree) == [(3,), (3, 3), (3, 3, 3), (3, 3, 3, 3)]
    asked_before = len(bench.parts[B].budgets)
    for _ in range(34):
        bench.step([3, 3, 3, 3, 3])
    assert len(bench.parts[B].budgets) - asked_before == 2
    assert bench.drafter.num_accepted[A] > 300
    assert bench.drafter.num_accepted[B] == 0


def test_a_part_comes_back_when_it_starts_to_succeed() -> None:
    bench = Bench(lambda n: chain(3, 3), lambda n: chain(4, 4), probe_interval=4)
    for _ in range(60):
        bench.step([3, 3, 3])
    assert (4,) not in bench.paths(bench.step([3, 3, 3]))
    for _ in range(60):
        bench.step([4, 4, 4])
    assert (4, 4) in bench.paths(bench.step([4, 4, 4]))
    assert (3,) not in bench.paths(bench.step([4, 4, 4]))


def test_what_was_not_chosen_is_judged_too() -> None:
    """With a budget of one node only A's fits at first, yet B is seen to be right."""
    bench = Bench(lambda n: chain(3), lambda n: chain(4))
    assert bench.paths(bench.step([4, 9], budget=1)) == [(3,)]
    for _ in range(3):
        bench.step([4, 9], budget=1)
    assert bench.paths(bench.step([4, 9], budget=1)) == [(4,)]


def test_each_request_is_judged_by_itself_and_new_ones_start_from_all() -> None:
    bench = Bench(lambda n: chain(3, 3), lambda n: chain(4, 4))
    for _ in range(40):
        bench.step([3, 3, 3], slot=0)
        bench.step([4, 4, 4], slot=1)
    assert bench.paths(bench.step([3, 3, 3], slot=0)) == [(3,), (3, 3)]
    assert bench.paths(bench.step([4, 4, 4], slot=1)) == [(4,), (4, 4)]
    for _ in range(60):
        bench.step([3, 3, 3], slot=0)
    bench.admit(1)
    assert bench.paths(bench.drafter.propose([DraftRequest(1, 1)])) == [(3,)]


def test_right_tokens_that_are_not_worth_a_row_count_for_nothing() -> None:
    trie = DraftTrie()
    trie.add(0, [1, 2, 3], [ROOT, 0, 1])
    trie.add(1, [1, 2], [ROOT, 0])
    rates = {0: 0.5, 1: 0.2}
    count = trie.num_worth_verifying
    # worth: 1 - 0.5 * 0.8 = 0.6; 0.36; 0.18
    assert count([1, 2, 3], lambda part, depth, grade: rates[part], 0.3) == 2
    assert count([1, 2, 3], lambda part, depth, grade: rates[part], 0.1) == 3
    assert count([1, 9, 3], lambda part, depth, grade: rates[part], 0.1) == 1
    assert count([1, 2, 3], lambda part, depth, grade: rates[part], 0.7) == 0


def test_chains_are_drafted_no_deeper_than_they_are_likely_to_be_right() -> None:
    bench = Bench(lambda n: chain(3, 9, 9, 9, 9, 9, 9, 9), lambda n: chain(5))
    for _ in range(80):
        bench.step([3, 3])
    assert bench.parts[A].budgets[-1] == 1
    assert bench.parts[A].budgets[0] == 4  # at first every second node is taken for right


def test_a_part_that_proposes_trees_gets_the_whole_budget() -> None:
    bench = Bench(lambda n: ([3, 4, 5], [-1, -1, -1]), lambda n: chain(5))
    bench.step([3, 3], budget=8)
    bench.step([3, 3], budget=8)
    assert bench.parts[A].budgets[1] == 8


def test_drawn_drafts_are_never_chosen_by_what_they_are() -> None:
    """Under the rejection rule one part drafts alone, with its laws; which one past rounds alone decide."""
    bench = Bench(lambda n: chain(3, 4), lambda n: chain(3, 9), law_b=0.02)
    for _ in range(12):
        bench.step([3, 4, 5])
        bench.admit(1)
    tree = bench.step([7])
    assert bench.paths(tree) in ([(3,), (3, 4)], [(3,), (3, 9)])  # both first nodes are equally often right
    for _ in range(30):
        bench.step([7])
    bench.parts[B]._nodes = lambda n: chain(6, 6)
    for _ in range(30):
        tree = bench.step([6, 6, 6])
    assert bench.paths(tree)[:2] == [(6,), (6, 6)]
    assert tree.q is not None
    assert tree.q[1:].eq(0.02).all()
    assert not tree.q[0].any()


def test_rounds_of_other_methods_teach_nothing() -> None:
    bench = Bench(lambda n: chain(3), lambda n: chain(4))
    bench.drafter.propose([DraftRequest(0, 4)])
    bench.table.append_each(np.array([0]), [[4, 4]])  # the result of some other round
    rate = bench.drafter._rates.rate(0, 0, 1, Grade(0))
    bench.drafter.catch_up([TargetProgress(0, 4, 0, 1, np.arange(2))], HIDDEN)
    assert bench.drafter._rates.rate(0, 0, 1, Grade(0)) == rate
    bench.drafter.release(0)
    bench.drafter.catch_up([TargetProgress(0, 4, 1, 1, np.arange(2))], HIDDEN)
    assert bench.drafter._rates.rate(0, 0, 1, Grade(0)) == rate


def test_nothing_proposed_is_a_bare_root() -> None:
    bench = Bench(lambda n: ([], []), lambda n: ([], []))
    assert bench.step([5]).num_nodes == 1


def test_trie_takes_equal_children_as_one_and_values_agreement() -> None:
    trie = DraftTrie()
    trie.add(0, [1, 2, 3], [ROOT, ROOT, 0])
    trie.add(1, [2, 9], [ROOT, 0])
    assert (trie.tokens, trie.parents, trie.depths) == ([1, 2, 3, 9], [ROOT, ROOT, 0, 1], [1, 1, 2, 2])
    best, second = Grade(0), Grade(1)
    assert trie.proposers == [[(0, best)], [(0, second), (1, best)], [(0, best)], [(1, best)]]
    # worth: 0.4; 1 - 0.6 * 0.6 = 0.64; 0.16; 0.256
    assert trie.best(9, lambda part, depth, grade: 0.4, 0.2) == [1, 0, 3]
    assert trie.best(1, lambda part, depth, grade: 0.4, 0.2) == [1]
    assert trie.best(9, lambda part, depth, grade: 0.0, 0.1) == []


@pytest.mark.parametrize(
    ("emitted", "right"),
    [
        ([2, 9, 5], {(0, 1, 1), (1, 1, 0), (1, 2, 0)}),
        ([1, 7], {(0, 1, 0)}),
        ([7], set()),
    ],
)
def test_trie_judges_where_the_parent_was_right(emitted: list[int], right: set[tuple[int, int, int]]) -> None:
    trie = DraftTrie()
    trie.add(0, [1, 2, 3], [ROOT, ROOT, 0])
    trie.add(1, [2, 9], [ROOT, 0])
    seen = trie.judge(emitted)
    assert {(part, depth, grade.rank) for part, depth, grade, was_right in seen if was_right} == right
    at_first = {(part, grade.rank) for part, depth, grade, _ in seen if depth == 1}
    assert at_first == {(0, 0), (0, 1), (1, 0)}
    assert any(depth == 2 for _, depth, _, _ in seen) == (emitted[0] != 7)


def test_rates_converge_and_are_clipped_in_depth_and_rank() -> None:
    rates = SuccessRates(num_slots=1, num_parts=1)
    rng = np.random.default_rng(0)
    for _ in range(400):
        rates.record(0, 0, MAX_DEPTH + 5, Grade(MAX_RANKS + 5), bool(rng.random() < 0.7))
    assert rates.rate(0, 0, MAX_DEPTH, Grade(MAX_RANKS - 1)) == pytest.approx(0.7, abs=0.2)
    rates.admit(0)
    assert rates.rate(0, 0, MAX_DEPTH + 1, Grade(MAX_RANKS)) == pytest.approx(0.7, abs=0.1)
    assert rates.reach(0, 0, 0.05) == 4
    assert rates.reach(0, 0, 0.6) == 0


def test_a_part_is_believed_as_far_as_its_sureness_was_right() -> None:
    """Whatever it says: nodes it calls likely may turn out wrong, and unlikely ones right."""
    rates = SuccessRates(num_slots=1, num_parts=1)
    assert rates.rate(0, 0, 3, Grade(5, 0.95)) > 0.9
    for _ in range(60):
        rates.record(0, 0, 1, Grade(0, 0.95), False)
        rates.record(0, 0, 2, Grade(1, 0.1), True)
    assert rates.rate(0, 0, 3, Grade(5, 0.95)) < 0.1
    assert rates.rate(0, 0, 3, Grade(5, 0.1)) > 0.9
    assert rates.rate(0, 0, 1, Grade(0, 1.0)) == rates.rate(0, 0, 9, Grade(0, 0.99))
    assert rates.reach(0, 0, 0.3) == 0  # by rank: the first node was never right
