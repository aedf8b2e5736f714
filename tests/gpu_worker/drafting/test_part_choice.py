"""Which parts a portfolio asks: by what they are right in, alone and beside others, and by the time that they take."""

from __future__ import annotations

import pytest

from gpu_worker.drafting.base import DraftRequest
from gpu_worker.drafting.part_choice import PartChoice
from tests.gpu_worker.drafting.portfolio_bench import HIDDEN, A, B, Bench, chain


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


@pytest.mark.parametrize(("seconds", "num_asked"), [((0.1, 0.2), (80, 10)), ((0.2, 0.1), (10, 80))])
def test_of_parts_that_agree_the_quicker_one_is_asked(
    seconds: tuple[float, float], num_asked: tuple[int, int]
) -> None:
    """Twins are right equally often, alone or together."""
    bench = Bench(lambda n: chain(3, 3), lambda n: chain(3, 3), probe_interval=8)
    bench.parts[A].seconds, bench.parts[B].seconds, bench.rest = *seconds, 1.0
    for _ in range(8):
        bench.step([3, 3, 3])
    assert asks(bench, 80, [3, 3, 3]) == num_asked
    for part in bench.parts.values():
        part.seconds = 0.1
    asks(bench, 80, [3, 3, 3])
    assert sum(asks(bench, 80, [3, 3, 3])) == 90  # either, and both in every eighth step


def test_a_sequence_gets_its_own_good_part_though_another_one_is_better_for_all() -> None:
    """A is right for slot 0, and never for slot 1, where B is: no sequence is left without drafts."""
    bench = Bench(lambda n: chain(3, 3, 3), lambda n: chain(4), probe_interval=8)
    bench.parts[A].seconds, bench.parts[B].seconds, bench.rest = 0.1, 0.1, 1.0
    for _ in range(60):
        bench.step([3, 3, 3, 3], slot=0)
        bench.step([4, 9], slot=1)
    assert not bench.drafter._rates.reach(1, 0, bench.drafter._least_probability)  # A is out for slot 1
    for _ in range(9):
        assert bench.paths(bench.step([3, 3, 3, 3], slot=0)) == [(3,), (3, 3), (3, 3, 3)]
        assert bench.paths(bench.step([4, 9], slot=1)) == [(4,)]


def test_a_call_that_was_held_up_excludes_nobody() -> None:
    bench = Bench(lambda n: chain(3, 3), lambda n: chain(4, 4), probe_interval=8)
    bench.parts[A].seconds, bench.parts[B].seconds, bench.rest = 0.1, 0.1, 1.0
    num_asked = 0
    for turn in range(60):
        for part in bench.parts.values():
            part.seconds = 30.0 if turn == 30 else 0.1
        num_asked = len(bench.parts[B].budgets)
        bench.step([4, 4, 9] if turn % 3 == 2 else [3, 3, 9])
    assert num_asked == 59


def test_steps_with_prompts_in_them_say_nothing_of_a_decode_steps_time() -> None:
    bench = Bench(lambda n: chain(3, 3), lambda n: chain(4, 4))
    for seconds, has_prompt in [(1.0, False), (20.0, True), (20.0, True), (20.0, True), (1.0, False)]:
        bench.drafter.propose([DraftRequest(0, 2)])
        bench.clock.now += seconds
        if has_prompt:
            bench.drafter.prefill([], HIDDEN)
        bench.drafter.catch_up([], HIDDEN)
    assert bench.drafter._choice._rest.seconds == 1.0


def test_right_tokens_that_no_budget_could_verify_count_for_nothing() -> None:
    """B is right eight tokens deep, of which two may be verified: A's two are worth as much and cost less."""
    bench = Bench(lambda n: chain(3, 3), lambda n: chain(*[3] * 8), probe_interval=8)
    bench.parts[B].seconds, bench.rest = 0.5, 1.0
    for _ in range(40):
        bench.step([3] * 9, budget=2)
    before = len(bench.parts[B].budgets)
    for _ in range(16):
        bench.step([3] * 9, budget=2)
    assert len(bench.parts[B].budgets) - before == 2
    assert bench.drafter._choice._of_slots[0].max() == 2.0


def test_a_sequence_starts_from_all_when_it_first_drafts_not_when_it_was_admitted() -> None:
    choice = PartChoice(num_slots=2, num_parts=1)
    choice.admit(0)
    choice.admit(1)
    for length in (4, 2):
        choice.record(0, 1, [1] * length)
    assert choice._of_slots[0].tolist() == [0.0, 3.0]
    choice.record(1, 1, [])
    assert choice._of_slots[1].tolist() == [0.0, pytest.approx(2.0)]  # as a third step of all


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
    assert choice.best(0, 0b111) in (0b011, 0b110)
    for _ in range(200):  # the second part is not right any more
        choice.record(0, 0b111, [0b101])
    assert choice.best(0, 0b111) in (0b001, 0b100)


def test_what_was_not_asked_is_not_judged() -> None:
    choice = PartChoice(num_slots=1, num_parts=2)
    choice.record(0, 0b11, [0b10, 0b10])
    choice.admit(0)
    for _ in range(50):
        choice.record(0, 0b01, [])
    assert choice.best(0, 0b11) == 0b11
    assert choice._of_slots[0].tolist() == [0.0, 0.0, 2.0, 2.0]
