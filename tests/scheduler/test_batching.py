"""Budget, chunks, fairness, priorities, preemption."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.scheduler.scheduler import ResultError
from shared_mem.enums import FinishReason, SpeculationMethod
from shared_mem.records import RowResult, StepResult
from tests.scheduler.harness import Harness, make_limits, make_submit, prompt_of
from tests.scheduler.simulated_worker import model_text


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    harness = Harness(make_limits(max_batched_tokens=10))
    harness.submit(make_submit("short", prompt_of(4), max_tokens=20, method=SpeculationMethod.DISABLED))
    harness.step()
    harness.submit(make_submit("long", prompt_of(30, 2), max_tokens=2))
    chunks = []
    while ("long", 0) not in harness.outputs:
        plan = harness.step()
        assert plan is not None
        decode, prefill = plan.rows
        assert (decode.num_query, decode.samples) == (1, True)
        chunks.append(prefill.num_query)
        assert prefill.samples == (sum(chunks) == 30)
    assert chunks == [9, 9, 9, 3]
    harness.run()
    assert harness.output("long").tokens == model_text(prompt_of(30, 2), 1, 2)
    assert harness.output("short").tokens == model_text(prompt_of(4), 1, 20)


def test_drafts_take_only_what_prefill_leaves() -> None:
    harness = Harness(make_limits(max_batched_tokens=10), acceptance=0.0)
    harness.submit(make_submit("a", prompt_of(4), max_tokens=30))
    harness.step()
    assert [row.num_draft_tokens for row in harness.step().rows] == [4]
    harness.submit(make_submit("b", prompt_of(16, 2), max_tokens=30))
    assert [(row.num_query, row.num_draft_tokens) for row in harness.step().rows] == [(1, 0), (9, 0)]
    assert [(row.num_query, row.num_draft_tokens) for row in harness.step().rows] == [(1, 2), (7, 0)]
    assert [(row.num_query, row.num_draft_tokens) for row in harness.step().rows] == [(1, 4), (1, 4)]
    assert harness.worker.peak_rows == 10


def test_decode_only_drafts_wait_for_steps_without_prefill() -> None:
    harness = Harness(make_limits(drafts_beside_prefill=False), acceptance=0.0)
    harness.submit(make_submit("a", prompt_of(4), max_tokens=30))
    harness.step()
    harness.submit(make_submit("b", prompt_of(4, 2), max_tokens=30))
    plan = harness.step()
    assert [row.num_draft_tokens for row in plan.rows] == [0, 0]
    assert plan.rows[0].method is SpeculationMethod.NGRAM  # the drafter follows all the same
    assert [row.num_draft_tokens for row in harness.step().rows] == [4, 4]


def test_scarce_draft_rows_are_shared_evenly() -> None:
    harness = Harness(make_limits(max_batched_tokens=9, max_running_requests=4), acceptance=0.0)
    for i in range(4):
        harness.submit(make_submit(str(i), prompt_of(2, i), max_tokens=30))
    for _ in range(3):
        plan = harness.step()
    assert [row.num_draft_tokens for row in plan.rows] == [2, 1, 1, 1]


def test_slots_never_exceed_the_budget_so_everybody_advances() -> None:
    harness = Harness(make_limits(max_batched_tokens=4, max_running_requests=4))
    for i in range(6):
        harness.submit(make_submit(str(i), prompt_of(6, i), max_tokens=6, arrival_time=i))
    harness.run()
    for i in range(6):
        assert harness.output(str(i)).tokens == model_text(prompt_of(6, i), 1, 6)


def test_higher_priority_is_admitted_first() -> None:
    harness = Harness(make_limits(max_running_requests=1))
    for name, priority in (("normal", 0), ("low", -5), ("high", 5)):
        harness.submit(make_submit(name, prompt_of(4), max_tokens=2, priority=priority))
    order = []
    while harness.step() is not None:
        for (name, _), output in harness.outputs.items():
            if output.finished and name not in order:
                order.append(name)
    assert order == ["high", "normal", "low"]


def test_preemption_takes_the_lowest_priority_then_the_latest() -> None:
    harness = Harness(make_limits(num_pages=16))
    prompts = {name: prompt_of(12, i) for i, name in enumerate(("old", "new", "low"))}
    for name, priority, arrival in (("old", 0, 0.0), ("new", 0, 1.0), ("low", -1, 0.5)):
        submit = make_submit(name, prompts[name], max_tokens=40, priority=priority, arrival_time=arrival)
        harness.submit(submit)
    order = []
    preempt = harness.scheduler._planner.preempt

    def record(sequence) -> None:  # type: ignore[no-untyped-def]
        order.append(sequence.request.request_id)
        preempt(sequence)

    harness.scheduler._planner.preempt = record  # type: ignore[method-assign]
    harness.run()
    assert order[0] == "low"
    assert "new" in order
    assert "old" not in order
    for name in ("old", "new", "low"):
        output = harness.output(name)
        assert output.tokens == model_text(prompts[name], 1, 40)
        assert output.finished.num_preemptions == order.count(name)
    harness.assert_idle_and_clean()


def test_drafts_give_way_before_anybody_is_preempted() -> None:
    """Two sequences fill the pool exactly; drafting would need a page more for each."""
    limits = make_limits(num_pages=8, max_context_tokens=16, page_size=4)
    harness = Harness(limits, acceptance=0.0)
    for name in ("a", "b"):
        harness.submit(make_submit(name, prompt_of(7, ord(name)), max_tokens=9, max_draft_tokens=8))
    harness.run()
    assert harness.scheduler.counters.num_preemptions == 0
    assert all(row.num_draft_tokens <= 8 for plan in harness.plans for row in plan.rows)
    assert harness.output("a").finished.reason is FinishReason.LENGTH


def test_a_preempted_sequence_hits_what_is_left_of_its_pages() -> None:
    harness = Harness(make_limits(num_pages=20))
    harness.submit(make_submit("a", prompt_of(20, 1), max_tokens=40))
    harness.submit(make_submit("b", prompt_of(20, 2), max_tokens=40, arrival_time=1.0))
    harness.run()
    admissions = [admission for plan in harness.plans for admission in plan.admissions]
    readmissions = [a for a in admissions if len(a.token_ids) > a.num_prompt_tokens]
    assert readmissions
    assert all(admission.num_prompt_tokens == 20 for admission in readmissions)
    assert any(admission.num_cached_tokens > 0 for admission in readmissions)
    assert harness.output("b").tokens == model_text(prompt_of(20, 2), 1, 40)
    assert harness.output("b").started.num_cached_tokens == 0  # of the first admission


@pytest.mark.parametrize("length", range(57, 64))
@pytest.mark.parametrize("method", [SpeculationMethod.NGRAM, SpeculationMethod.DRAFT_MODEL])
def test_prompts_close_to_the_context_limit(length: int, method: SpeculationMethod) -> None:
    harness = Harness(make_limits(max_context_tokens=64, num_pages=16), acceptance=1.0)
    harness.submit(make_submit("r", prompt_of(length), max_tokens=100, method=method))
    harness.run()
    output = harness.output("r")
    assert output.tokens == model_text(prompt_of(length), 1, 64 - length)
    assert output.finished.reason is FinishReason.LENGTH


def test_past_the_draft_models_context_decoding_is_plain() -> None:
    facts = make_limits().drafters[SpeculationMethod.DRAFT_MODEL]
    drafters = {SpeculationMethod.DRAFT_MODEL: type(facts)(2, "draft", 8, max_context_tokens=32)}
    harness = Harness(
        make_limits(drafters=drafters, default_method=SpeculationMethod.DRAFT_MODEL), acceptance=0.7
    )
    harness.submit(make_submit("r", prompt_of(20), max_tokens=44))
    harness.run()
    for plan in harness.plans:
        for row in plan.rows:
            if row.num_computed + row.num_query >= 32:
                assert row.method is SpeculationMethod.DISABLED
            # the last draft token's position stays below the draft model's limit
            assert not row.num_draft_tokens or row.num_computed + row.num_query + row.num_draft_tokens <= 32
    assert any(row.num_draft_tokens for plan in harness.plans for row in plan.rows)
    assert harness.output("r").tokens == model_text(prompt_of(20), 1, 44)


def test_the_drafter_follows_prefill_rows_but_they_do_not_draft() -> None:
    harness = Harness(make_limits(max_batched_tokens=8))
    harness.submit(make_submit("r", prompt_of(12), method=SpeculationMethod.DRAFT_MODEL))
    harness.submit(make_submit("off", prompt_of(12, 2), method=SpeculationMethod.DISABLED))
    harness.run()
    prefills = [row for plan in harness.plans for row in plan.rows if row.num_query > 1]
    assert {(row.method, row.num_draft_tokens) for row in prefills} == {
        (SpeculationMethod.DRAFT_MODEL, 0),
        (SpeculationMethod.DISABLED, 0),
    }


def test_surplus_pages_go_back_with_every_result() -> None:
    harness = Harness(make_limits(prefix_cache=False), acceptance=0.0)
    harness.submit(make_submit("r", prompt_of(8), max_tokens=20, max_draft_tokens=16))
    ledger = harness.scheduler._allocator.ledger
    harness.step()
    for _ in range(3):
        num_tokens = 8 + len(harness.output("r").tokens)
        assert ledger.num_owned == -(-num_tokens // 4)
        harness.dispatch()
        assert ledger.num_owned == -(-(num_tokens + 16 + 1) // 4)
        harness.deliver()


def test_results_that_do_not_fit_the_plan_are_refused() -> None:
    harness = Harness()
    harness.submit(make_submit("r", prompt_of(4)))
    with pytest.raises(ResultError, match="expected none"):
        harness.scheduler.apply(StepResult(1, ()))
    plan = harness.dispatch()
    row = plan.rows[0]
    with pytest.raises(ResultError, match="expected 1"):
        harness.scheduler.apply(StepResult(2, ()))
    with pytest.raises(ResultError, match="not those of its plan"):
        harness.scheduler.apply(StepResult(1, ()))
    empty = RowResult(row.slot, row.epoch, np.zeros(0, dtype=np.int32))
    with pytest.raises(ResultError, match="0 tokens, expected 1"):
        harness.scheduler.apply(StepResult(1, (empty,)))


def test_whoever_is_preempted_does_not_come_back_in_the_same_plan() -> None:
    harness = Harness(make_limits(num_pages=16))
    for i in range(3):
        harness.submit(make_submit(str(i), prompt_of(12, i), max_tokens=40, arrival_time=i))
    num_preemptions = 0
    while (plan := harness.step()) is not None:
        if harness.scheduler.counters.num_preemptions > num_preemptions:
            num_preemptions = harness.scheduler.counters.num_preemptions
            assert not plan.admissions
    assert num_preemptions > 0


def test_admissions_leave_a_page_for_each_running_sequence() -> None:
    """Without it the newcomer would take the last pages and lose them at once to the older sequence."""
    harness = Harness(make_limits(num_pages=8, max_context_tokens=32, prefix_cache=False))
    harness.submit(make_submit("old", prompt_of(13), max_tokens=8, max_draft_tokens=0))
    harness.step()
    harness.submit(make_submit("new", prompt_of(15, 2), max_tokens=4, max_draft_tokens=0, arrival_time=1.0))
    harness.run()
    assert harness.scheduler.counters.num_preemptions == 0


def test_nobody_is_admitted_into_pages_that_a_running_prompt_still_needs() -> None:
    """While a chunk is in flight its sequence has no row, but its prompt goes on."""
    harness = Harness(make_limits(num_pages=16, max_batched_tokens=16), max_steps_in_flight=2)
    harness.submit(make_submit("long", prompt_of(48), max_tokens=8))
    harness.submit(make_submit("next", prompt_of(20, 2), max_tokens=4, arrival_time=1.0))
    harness.run()
    assert harness.scheduler.counters.num_preemptions == 0
    assert harness.output("next").tokens == model_text(prompt_of(20, 2), 1, 4)


def test_prompt_logprobs_start_anew_when_a_prompt_is_preempted() -> None:
    harness = Harness(make_limits(max_batched_tokens=8))
    harness.submit(make_submit("r", prompt_of(30), num_prompt_logprobs=0))
    harness.step()
    harness.dispatch()
    (sequence,) = harness.scheduler._slots.running
    harness.scheduler._planner.preempt(sequence)
    harness.deliver()
    harness.run()
    logprobs = harness.output("r").started.prompt_logprobs
    assert [logprob.token_id for logprob in logprobs] == list(prompt_of(30)[1:])


def test_delivered_prompt_logprobs_are_not_computed_again() -> None:
    harness = Harness()
    harness.submit(make_submit("r", prompt_of(14), max_tokens=20, num_prompt_logprobs=0))
    harness.step()
    harness.step()
    (sequence,) = harness.scheduler._slots.running
    harness.scheduler._planner.preempt(sequence)
    plan = harness.step()
    (admission,) = plan.admissions
    assert admission.sampling.num_prompt_logprobs == -1
    assert admission.num_cached_tokens >= 12
    harness.run()
    assert harness.output("r").tokens == model_text(prompt_of(14), 1, 20)
