"""The portfolio: trees merged by prefixes, the budget to what succeeds, learning from all that was proposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from gpu_worker.draft_tree import DraftTree, tree_of
from gpu_worker.drafting.base import DraftRequest, TargetHidden, TargetProgress
from gpu_worker.drafting.part_choice import PartChoice
from gpu_worker.drafting.portfolio import PortfolioDrafter
from gpu_worker.drafting.success import MAX_DEPTH, MAX_RANKS, SuccessRates
from gpu_worker.drafting.trie import ROOT, DraftTrie, Grade
from gpu_worker.request_state import RequestTable
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission, SamplingRecord

A, B = SpeculationMethod.NGRAM, SpeculationMethod.EAGLE3
HIDDEN = TargetHidden(torch.zeros(0, 1), None, ())
VOCAB = 50

Nodes = tuple[list[int], list[int]]  # tokens and parents behind the root


def chain(*tokens: int) -> Nodes:
    return list(tokens), list(range(-1, len(tokens) - 1))


class Clock:
    """Goes on as a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Part:
    """Proposes what a test says, cut to the budget, and notes what it was asked for."""

    keeps_state = False
    hidden_layers = None

    def __init__(
        self,
        method: SpeculationMethod,
        table: RequestTable,
        nodes: Callable[[int], Nodes],
        law: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self.method = method
        self.budgets: list[int] = []
        self.seconds = 0.0  # what it takes to draft
        self._clock = clock or Clock()
        self._table = table
        self._nodes = nodes
        self._law = law

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTree:
        self.budgets += [request.num_draft_tokens for request in requests]
        self._clock.now += self.seconds
        of = [self._nodes(int(self._table.num_tokens[request.slot])) for request in requests]
        tokens = [nodes[: r.num_draft_tokens] for (nodes, _), r in zip(of, requests, strict=True)]
        parents = [above[: r.num_draft_tokens] for (_, above), r in zip(of, requests, strict=True)]
        roots = [int(self._table.known(request.slot)[-1]) for request in requests]
        tree = tree_of(roots, tokens, parents)
        if not self._law:
            return tree
        return tree.with_laws([[torch.full((VOCAB,), self._law) for _ in drafts] for drafts in tokens])

    def admit(self, admission: Admission) -> None: ...
    def release(self, slot: int) -> None: ...
    def prefill(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None: ...
    def catch_up(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None: ...
    def num_computed_after(self, progress: TargetProgress) -> int:
        return 0


class Bench:
    """A table of two slots and a portfolio; `step` lets the target emit given tokens."""

    def __init__(self, a: Callable[[int], Nodes], b: Callable[[int], Nodes], **options: float) -> None:
        self.table = RequestTable(2, 2000, 16, torch.device("cpu"))
        laws = {name: options.pop(name, 0.0) for name in ("law_a", "law_b")}
        self.clock = Clock()
        self.parts = {
            A: Part(A, self.table, a, laws["law_a"], self.clock),
            B: Part(B, self.table, b, laws["law_b"], self.clock),
        }
        self.rest = 0.0  # seconds of a step beside its drafting
        self.drafter = PortfolioDrafter(self.parts, self.table, clock=self.clock, **options)  # type: ignore[arg-type]
        for slot in (0, 1):
            self.admit(slot)

    def admit(self, slot: int) -> None:
        admission = Admission(slot, 1, np.array([1, 2], dtype=np.int32), 2, 0, 0, SamplingRecord())
        self.table.admit(admission)
        self.drafter.admit(admission)

    def paths(self, tree: DraftTree, request: int = 0) -> list[tuple[int, ...]]:
        """Tokens down to each node behind the root, in the tree's order."""
        start, stop = int(tree.indptr[request]), int(tree.indptr[request + 1])
        path: dict[int, tuple[int, ...]] = {start: ()}
        for node in range(start + 1, stop):
            path[node] = (*path[int(tree.parents[node])], int(tree.tokens[node]))
        return [path[node] for node in range(start + 1, stop)]

    def step(self, emitted: list[int], slot: int = 0, budget: int = 8) -> DraftTree:
        """One round whose result is `emitted`; accepted are those on a path of the tree."""
        tree = self.drafter.propose([DraftRequest(slot, budget)])
        accepted = 0
        while accepted < len(emitted) - 1 and tuple(emitted[: accepted + 1]) in self.paths(tree):
            accepted += 1
        emitted = emitted[: accepted + 1]
        first = int(self.table.num_tokens[slot]) - 1
        self.table.append_each(np.array([slot]), [emitted])
        known = int(self.table.num_tokens[slot])
        progress = TargetProgress(slot, known, accepted, first, np.arange(accepted + 1))
        self.clock.now += self.rest
        self.drafter.catch_up([progress], HIDDEN)
        return tree


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


def asks(bench: Bench, steps: int, emitted: list[int]) -> tuple[int, int]:
    """How often A and B are asked in so many more steps."""
    before = [len(part.budgets) for part in bench.parts.values()]
    for _ in range(steps):
        bench.step(emitted)
    counts = [len(part.budgets) - n for part, n in zip(bench.parts.values(), before, strict=True)]
    return counts[0], counts[1]


@pytest.mark.parametrize(("seconds", "num_asked"), [(0.0, 81), (0.2, 81), (0.5, 10)])
def test_a_part_is_asked_if_what_it_adds_is_worth_its_time(seconds: float, num_asked: int) -> None:
    """A is right in two steps of three, B in the third: 3 tokens a step instead of 2.33, for more time."""
    bench = Bench(lambda n: chain(3, 3), lambda n: chain(4, 4), probe_interval=8)
    bench.parts[A].seconds, bench.parts[B].seconds, bench.rest = 0.1, seconds, 1.0
    for turn in range(30):
        bench.step([4, 4, 9] if turn % 3 == 2 else [3, 3, 9])
    before = len(bench.parts[B].budgets)
    for turn in range(81):
        bench.step([4, 4, 9] if turn % 3 == 2 else [3, 3, 9])
    assert len(bench.parts[A].budgets) == 30 + 81
    assert len(bench.parts[B].budgets) - before == num_asked


def test_of_parts_that_agree_one_is_asked() -> None:
    """Twins are right equally often, alone or together; the better half of such a pair is the quicker one."""
    bench = Bench(lambda n: chain(3, 3), lambda n: chain(3, 3), probe_interval=8)
    bench.parts[A].seconds, bench.parts[B].seconds, bench.rest = 0.1, 0.1, 1.0
    for _ in range(8):
        bench.step([3, 3, 3])
    assert asks(bench, 80, [3, 3, 3]) == (80, 10)


def test_a_dear_part_comes_back_when_it_adds_enough() -> None:
    bench = Bench(lambda n: chain(3), lambda n: chain(3, 3, 3, 3, 3), probe_interval=8)
    bench.parts[B].seconds, bench.rest = 1.0, 1.0
    for _ in range(40):
        bench.step([3, 9])
    assert asks(bench, 16, [3, 9]) == (16, 2)
    for _ in range(100):
        bench.step([3, 3, 3, 3, 3, 9])
    assert asks(bench, 16, [3, 3, 3, 3, 3, 9])[1] == 16


def test_sets_of_parts_are_measured_as_sets() -> None:
    """Two parts that are right in turn add up; a third that says what one of them says adds nothing."""
    choice = PartChoice(num_slots=1, num_parts=3)
    for part, seconds in enumerate((0.2, 0.2, 0.2)):
        choice.record_time(part, seconds)
    choice.record_rest(1.0)
    choice.admit(0)
    for step in range(200):
        choice.record(0, 0b111, [0b101, 0b101] if step % 2 else [0b010, 0b010])
    assert choice.best(0) in (0b011, 0b110)
    for _ in range(200):  # the second part is not right any more
        choice.record(0, 0b111, [0b101])
    assert choice.best(0) in (0b001, 0b100)


def test_what_was_not_asked_is_not_judged() -> None:
    choice = PartChoice(num_slots=1, num_parts=2)
    choice.record(0, 0b11, [0b10, 0b10])
    choice.admit(0)
    for _ in range(50):
        choice.record(0, 0b01, [])
    assert choice.best(0) == 0b11
    assert choice._of_slots[0].tolist() == [0.0, 0.0, 2.0, 2.0]


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
