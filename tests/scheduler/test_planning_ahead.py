"""Plans made while steps are in flight: the workers never wait, and nothing is planned that cannot be."""

from __future__ import annotations

import pytest

from shared_mem.control import DrafterFacts
from shared_mem.enums import FinishReason, SpeculationMethod
from shared_mem.records import FOLLOWS, StepPlan
from tests.scheduler.harness import Harness, make_limits, make_submit, prompt_of
from tests.scheduler.simulated_worker import model_text

DISABLED, DRAFT_MODEL = SpeculationMethod.DISABLED, SpeculationMethod.DRAFT_MODEL


def ahead(**options: object) -> Harness:
    """Two steps in flight."""
    limits = make_limits(**options.pop("limits", {}))  # type: ignore[arg-type]
    return Harness(limits, max_steps_in_flight=2, **options)


def dispatch_all(harness: Harness) -> list[StepPlan]:
    plans = []
    while (plan := harness.dispatch()) is not None:
        plans.append(plan)
    return plans


def test_a_plan_lies_ready_whenever_a_step_ends_and_holds_everybody() -> None:
    harness = ahead()
    for i in range(3):
        harness.submit(make_submit(str(i), prompt_of(5, i), max_tokens=10, method=DISABLED))
    dispatch_all(harness)
    for _ in range(9):
        assert harness.num_in_flight == 2
        harness.deliver()
        dispatch_all(harness)
    assert harness.num_in_flight == 1  # the last tokens: nobody goes on behind them
    harness.run()
    assert [len(plan.rows) for plan in harness.plans] == [3] * 10
    assert all(row.num_computed == FOLLOWS for plan in harness.plans[1:] for row in plan.rows)
    harness.assert_idle_and_clean()


def test_chunks_follow_each_other_and_the_first_decode_row_follows_the_last() -> None:
    harness = ahead(limits={"max_batched_tokens": 8})
    harness.submit(make_submit("r", prompt_of(20), max_tokens=5, max_draft_tokens=3))
    first, second = dispatch_all(harness)
    harness.deliver()
    (third,) = dispatch_all(harness)
    harness.deliver()
    (fourth,) = dispatch_all(harness)
    chunks = [
        (row.num_computed, row.num_query, row.samples)
        for row in (first.rows[0], second.rows[0], third.rows[0])
    ]
    assert chunks == [(0, 8, False), (8, 8, False), (16, 4, True)]
    (row,) = fourth.rows
    assert (row.num_computed, row.num_query, row.samples, row.num_draft_tokens) == (FOLLOWS, 1, True, 3)
    harness.run()
    assert harness.output("r").tokens == model_text(prompt_of(20), 1, 5)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_nothing_is_planned_behind_a_row_that_surely_ends_the_sequence(max_tokens: int) -> None:
    harness = ahead()
    harness.submit(make_submit("r", prompt_of(5), max_tokens=max_tokens, method=DISABLED))
    harness.run()
    assert len(harness.plans) == max_tokens


def test_a_row_behind_an_unforeseen_end_is_dropped_and_its_pages_wait_for_it() -> None:
    harness = ahead(limits={"prefix_cache": False})
    text = model_text(prompt_of(5), 1, 3)
    harness.submit(make_submit("r", prompt_of(5), max_tokens=30, stop_token_ids=(text[1],), method=DISABLED))
    ledger = harness.scheduler._allocator.ledger
    dispatch_all(harness)
    harness.deliver()
    dispatch_all(harness)
    harness.deliver()
    assert harness.output("r").finished.reason is FinishReason.STOP
    assert (harness.num_in_flight, ledger.num_owned) == (1, 0)
    assert ledger.num_quarantined > 0
    harness.submit(make_submit("next", prompt_of(5, 2), max_tokens=4))
    dispatch_all(harness)
    harness.deliver()
    assert ledger.num_quarantined == 0
    assert harness.output("r").tokens == text[:2]
    harness.run()
    assert harness.output("next").tokens == model_text(prompt_of(5, 2), 1, 4)
    assert harness.scheduler.counters.num_generated_tokens == 2 + 4
    harness.assert_idle_and_clean()


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_pages_cover_every_draft_of_both_steps_and_the_rest_comes_back(acceptance: float) -> None:
    harness = ahead(
        limits={"prefix_cache": False, "page_size": 2, "max_batched_tokens": 64},
        acceptance=acceptance,
        proposes_all=True,
    )
    harness.submit(make_submit("r", prompt_of(8), max_tokens=40, max_draft_tokens=7))
    ledger = harness.scheduler._allocator.ledger
    dispatch_all(harness)
    for num_generated in (1, 2 + 7 * acceptance):
        harness.deliver()
        dispatch_all(harness)
        assert len(harness.output("r").tokens) == num_generated
        num_pages = -(-(8 + len(harness.output("r").tokens) + 2 * (1 + 7)) // 2)
        assert ledger.num_owned == num_pages
    harness.run()
    assert harness.output("r").tokens == model_text(prompt_of(8), 1, 40)
    harness.assert_idle_and_clean()


def test_how_much_is_worth_drafting_is_judged_without_the_drafts_in_flight() -> None:
    harness = ahead(acceptance=0.0, proposes_all=True)
    harness.submit(make_submit("r", prompt_of(5), max_tokens=7, max_draft_tokens=4))
    harness.run()
    # tokens to come at least, minus the one that is drawn anyway
    assert [row.num_draft_tokens for plan in harness.plans for row in plan.rows] == [0, 4, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("length", range(55, 64))
@pytest.mark.parametrize("method", [SpeculationMethod.NGRAM, DRAFT_MODEL])
def test_prompts_close_to_the_context_limit(
    length: int, method: SpeculationMethod, acceptance: float
) -> None:
    """The simulated worker refuses positions behind the limit of the context or of the draft model."""
    drafters = {m: DrafterFacts(int(m), "", 16, 60 if m is DRAFT_MODEL else 0) for m in (method,)}
    harness = ahead(limits={"num_pages": 32, "drafters": drafters}, acceptance=acceptance, proposes_all=True)
    harness.submit(make_submit("r", prompt_of(length), max_tokens=100, method=method, max_draft_tokens=3))
    harness.run()
    output = harness.output("r")
    assert output.tokens == model_text(prompt_of(length), 1, 64 - length)
    assert output.finished.reason is FinishReason.LENGTH
    harness.assert_idle_and_clean()


def test_nobody_is_preempted_for_a_row_ahead() -> None:
    """Both fill their three pages to the last token and end there by a stop id: a row ahead finds no page."""
    harness = ahead(limits={"num_pages": 6, "max_context_tokens": 24, "prefix_cache": False})
    stops = {}
    for name in ("a", "b"):
        text = model_text(prompt_of(7, ord(name)), 1, 5)
        assert text.index(text[4]) == 4
        stops[name] = text
        options = {"max_tokens": 12, "method": DISABLED, "stop_token_ids": (text[4],)}
        harness.submit(make_submit(name, prompt_of(7, ord(name)), **options))  # type: ignore[arg-type]
    harness.run()
    assert harness.scheduler.counters.num_preemptions == 0
    assert {name: harness.output(name).tokens for name in stops} == stops
    harness.assert_idle_and_clean()


def test_nobody_is_preempted_while_a_sequence_surely_ends_with_the_step_in_flight() -> None:
    """The older one needs a page just when the last row of the younger one is in flight."""
    harness = ahead(limits={"num_pages": 6, "max_context_tokens": 24, "prefix_cache": False})
    harness.submit(make_submit("old", prompt_of(7), max_tokens=12, method=DISABLED))
    harness.submit(make_submit("young", prompt_of(5, 2), max_tokens=6, method=DISABLED, arrival_time=1.0))
    harness.run()
    assert harness.scheduler.counters.num_preemptions == 0
    assert harness.output("old").tokens == model_text(prompt_of(7), 1, 12)
    assert harness.output("young").tokens == model_text(prompt_of(5, 2), 1, 6)
    harness.assert_idle_and_clean()


def test_drafts_in_flight_do_not_keep_a_newcomer_out() -> None:
    """What drafts take comes back one step later than a plan needs it: they give way while somebody waits."""
    harness = ahead(
        limits={"num_pages": 13, "max_context_tokens": 52, "prefix_cache": False},
        acceptance=0.0,
        proposes_all=True,
    )
    harness.submit(make_submit("old", prompt_of(5), max_tokens=40, max_draft_tokens=16))
    for _ in range(3):
        dispatch_all(harness)
        harness.deliver()
    harness.submit(make_submit("new", prompt_of(22, 2), max_tokens=2, max_draft_tokens=0, arrival_time=1.0))
    for _ in range(4):
        dispatch_all(harness)
        harness.deliver()
    assert ("new", 0) in harness.outputs
    harness.run()
    assert harness.output("old").tokens == model_text(prompt_of(5), 1, 40)
    assert harness.scheduler.counters.num_preemptions == 0


def test_preempted_with_two_rows_in_flight_the_text_stays_the_same() -> None:
    harness = ahead(limits={"num_pages": 24})
    for i in range(2):
        harness.submit(make_submit(str(i), prompt_of(9, i), max_tokens=30, arrival_time=i))
    for _ in range(3):
        dispatch_all(harness)
        harness.deliver()
    dispatch_all(harness)
    victim = next(s for s in harness.scheduler._slots.running if s.request.request_id == "1")
    tokens = list(victim.tokens)
    harness.scheduler._planner.preempt(victim)
    harness.scheduler.check_integrity()
    harness.deliver()
    harness.deliver()
    assert victim.tokens == tokens
    harness.run()
    assert harness.output("1").tokens == model_text(prompt_of(9, 1), 1, 30)
    harness.assert_idle_and_clean()


@pytest.mark.parametrize("method", [DISABLED, DRAFT_MODEL])
def test_equal_pages_are_merged_though_rows_are_in_flight(method: SpeculationMethod) -> None:
    """The copy that is given up may still be read, and filled with draft KV, by the step in flight."""
    harness = ahead(limits={"max_batched_tokens": 64})
    for name in ("a", "b"):
        harness.submit(make_submit(name, prompt_of(13), max_tokens=10, method=method, max_draft_tokens=2))
    dispatch_all(harness)
    harness.deliver()
    ledger = harness.scheduler._allocator.ledger
    assert ledger.num_quarantined == 3
    dispatch_all(harness)
    harness.deliver()
    assert ledger.num_quarantined == 0
    harness.run()
    assert harness.output("a").tokens == harness.output("b").tokens == model_text(prompt_of(13), 1, 10)
    harness.assert_idle_and_clean()


def test_samples_wait_for_their_siblings_result_not_for_its_plan() -> None:
    harness = ahead()
    harness.submit(make_submit("r", prompt_of(18), n=3, method=DISABLED))
    plans = dispatch_all(harness)
    assert [len(plan.admissions) for plan in plans] == [1, 0]
    harness.deliver()
    (plan,) = dispatch_all(harness)
    assert [admission.num_cached_tokens for admission in plan.admissions] == [16, 16]
    harness.run()
    assert [harness.output("r", i).tokens for i in range(3)] == [
        model_text(prompt_of(18), 1 + i, 8) for i in range(3)
    ]


def test_with_three_steps_in_flight_one_sampling_row_at_most_is_behind_an_unknown_one() -> None:
    harness = Harness(max_steps_in_flight=3)
    harness.submit(make_submit("r", prompt_of(5), max_tokens=12, method=DISABLED))
    assert len(dispatch_all(harness)) == 2
    harness.run()
    assert harness.output("r").tokens == model_text(prompt_of(5), 1, 12)
