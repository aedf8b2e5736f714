"""Submit to last event: refusals, ends, aborts in every state, deadlines, what is counted."""

from __future__ import annotations

import gc

import pytest

from scheduler_svc.errors import ErrorReason
from scheduler_svc.messages import Cancel, LoadReply, MethodCounters, Rejected
from scheduler_svc.scheduler.prefix_cache import CacheNode
from scheduler_svc.scheduler.request import Request
from shared_mem.enums import FinishReason, SpeculationMethod
from tests.scheduler.harness import EOS, FRONTEND, Harness, make_limits, make_submit, prompt_of
from tests.scheduler.simulated_worker import model_text


def refused(harness: Harness, **options: object) -> Rejected:
    request = make_submit("refused", options.pop("prompt", prompt_of(4)), **options)  # type: ignore[arg-type]
    (outbound,) = harness.scheduler.submit(FRONTEND, request)
    assert isinstance(outbound.message, Rejected)
    return outbound.message


def test_a_live_id_is_refused_for_every_frontend_and_free_again_afterwards() -> None:
    harness = Harness()
    harness.submit(make_submit("r", prompt_of(4)))
    (outbound,) = harness.scheduler.submit(b"another", make_submit("r", prompt_of(4)))
    assert outbound.frontend == b"another"
    assert outbound.message.reason is ErrorReason.DUPLICATE_REQUEST_ID
    harness.run()
    assert harness.scheduler.submit(FRONTEND, make_submit("r", prompt_of(4))) == []


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    harness = Harness(make_limits(max_running_requests=1, max_queued_requests=2))
    for i in range(3):  # one can start at once, two wait
        harness.submit(make_submit(str(i), prompt_of(4)))
    assert not harness.rejected
    rejection = refused(harness)
    assert rejection.reason is ErrorReason.QUEUE_FULL
    assert rejection.retry_after > 0
    harness.step()
    assert refused(harness).reason is ErrorReason.QUEUE_FULL
    harness.run()
    assert harness.scheduler.submit(FRONTEND, make_submit("later", prompt_of(4))) == []


def test_the_queue_is_bounded_in_samples_and_takes_a_request_whole() -> None:
    harness = Harness(make_limits(max_running_requests=1, max_queued_requests=3))
    harness.submit(make_submit("three", prompt_of(4), n=3))  # one can start, two wait
    harness.submit(make_submit("five", prompt_of(4), n=5))
    assert not harness.rejected
    rejection = refused(harness)
    assert rejection.reason is ErrorReason.QUEUE_FULL
    assert "7 samples wait" in rejection.message
    harness.run()
    assert len(harness.outputs) == 8


def test_waiting_samples_share_one_prompt_until_each_runs() -> None:
    harness = Harness(make_limits(max_running_requests=2))
    harness.submit(make_submit("r", prompt_of(9), n=4, max_tokens=12))
    samples = harness.scheduler._requests["r"].sequences
    assert all(sample.tokens is samples[0].tokens for sample in samples)
    assert all(sample.page_keys is samples[0].page_keys for sample in samples)
    while harness.scheduler._queue:
        for sample in samples:
            shares = sample.tokens is sample.request.prompt
            assert shares == (sample.first_scheduled_time is None)
        assert samples[0].request.prompt == list(prompt_of(9))
        harness.step()
    harness.run()
    for i in range(4):
        assert harness.output("r", i).tokens == model_text(prompt_of(9), 1 + i, 12)


def test_free_slots_do_not_lengthen_the_queue_while_pages_are_short() -> None:
    harness = Harness(make_limits(num_pages=16, max_queued_requests=1, max_running_requests=8))
    harness.submit(make_submit("large", prompt_of(56), max_tokens=8))
    harness.submit(make_submit("waits", prompt_of(40, 2)))
    harness.step()
    harness.step()
    assert refused(harness).reason is ErrorReason.QUEUE_FULL


def test_a_method_that_is_not_loaded_is_named() -> None:
    drafters = {SpeculationMethod.NGRAM: make_limits().drafters[SpeculationMethod.NGRAM]}
    harness = Harness(make_limits(drafters=drafters))
    rejection = refused(harness, method=SpeculationMethod.DRAFT_MODEL)
    assert rejection.reason is ErrorReason.PRECONDITION
    assert "draft-model is not loaded; loaded: ngram" in rejection.message
    assert (
        harness.scheduler.submit(FRONTEND, make_submit("off", [1], method=SpeculationMethod.DISABLED)) == []
    )


@pytest.mark.parametrize("length", [0, 64, 65])
def test_prompts_that_cannot_fit_are_refused(length: int) -> None:
    assert refused(Harness(), prompt=prompt_of(length)).reason is ErrorReason.PROMPT_TOO_LONG


def test_a_draining_scheduler_refuses_and_finishes_what_lives() -> None:
    harness = Harness()
    harness.submit(make_submit("live", prompt_of(4)))
    harness.scheduler.accepting = False
    assert refused(harness).reason is ErrorReason.NOT_SERVING
    harness.run()
    assert harness.output("live").finished.reason is FinishReason.LENGTH


def test_a_run_with_a_stop_id_that_also_crosses_max_tokens() -> None:
    """Everything is drafted and accepted: a stop id inside the run, behind the limit, right at the limit."""
    prompt = next(p for p in map(prompt_of, range(5, 30)) if len(set(model_text(p, 1, 8))) == 8)
    text = model_text(prompt, 1, 8)
    for stop, max_tokens, kept, reason in (
        (text[2], 5, 3, FinishReason.STOP),
        (text[5], 5, 5, FinishReason.LENGTH),
        (text[4], 5, 5, FinishReason.STOP),
    ):
        harness = Harness(acceptance=1.0, proposes_all=True)
        harness.submit(
            make_submit("r", prompt, max_tokens=max_tokens, stop_token_ids=(stop,), max_draft_tokens=5)
        )
        harness.run()
        output = harness.output("r")
        assert output.tokens == text[:kept]
        assert output.finished.reason is reason
        assert output.finished.stop_token_id == (stop if reason is FinishReason.STOP else None)
        assert [step.num_accepted_tokens for step in output.steps] == [0, min(kept - 1, max_tokens - 2)]
        assert harness.scheduler.counters.num_generated_tokens == kept
        harness.assert_idle_and_clean()


def test_min_tokens_sends_the_ends_to_the_worker() -> None:
    harness = Harness()
    harness.submit(make_submit("a", prompt_of(4), min_tokens=3, ignore_eos=False, stop_token_ids=(9, 5)))
    harness.submit(make_submit("b", prompt_of(4), min_tokens=3, stop_token_ids=(9,)))
    harness.submit(make_submit("c", prompt_of(4), ignore_eos=False, stop_token_ids=(9,)))
    plan = harness.step()
    assert [admission.sampling.end_ids for admission in plan.admissions] == [(EOS, 5, 9), (9,), ()]


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5])
def test_aborted_and_cancelled_between_dispatch_and_result_twice_in_a_row(num_drafts: int) -> None:
    harness = Harness(make_limits(num_pages=12, max_context_tokens=40, prefix_cache=False))
    options = {"max_tokens": 24, "max_draft_tokens": num_drafts}
    ledger = harness.scheduler._allocator.ledger
    for round_number in range(2):
        first, second, stays = (f"{name}{round_number}" for name in ("abort", "cancel", "stay"))
        for i, name in enumerate((first, second, stays)):
            harness.submit(make_submit(name, prompt_of(6, i), **options))
        harness.step()
        harness.step()
        plan = harness.dispatch()
        assert len(plan.rows) == 3
        seen = len(harness.output(first).tokens), len(harness.output(second).tokens)
        harness.abort(first, "unknown")
        harness.cancel(second)
        assert ledger.num_quarantined > 0
        harness.deliver()  # the late rows are dropped
        assert ledger.num_quarantined == 0
        assert (len(harness.output(first).tokens), len(harness.output(second).tokens)) == seen
        assert harness.output(first).finished.reason is FinishReason.ABORTED
        assert harness.output(second).finished is None
        assert harness.aborted.pop() == first
        harness.run()
        assert harness.output(stays).tokens == model_text(prompt_of(6, 2), 1, 24)
        harness.assert_idle_and_clean()


def test_preempted_between_dispatch_and_result_and_resumed_with_the_same_text() -> None:
    harness = Harness(make_limits(num_pages=24))
    for i in range(2):
        harness.submit(make_submit(str(i), prompt_of(9, i), max_tokens=30, arrival_time=i))
    for _ in range(2):
        harness.step()
        harness.dispatch()
        victim = next(s for s in harness.scheduler._slots.running if s.request.request_id == "1")
        tokens = list(victim.tokens)
        harness.scheduler._planner.preempt(victim)
        harness.scheduler.check_integrity()
        harness.deliver()
        assert victim.tokens == tokens
    harness.run()
    assert harness.output("1").tokens == model_text(prompt_of(9, 1), 1, 30)
    assert harness.output("1").finished.num_preemptions == 2
    harness.assert_idle_and_clean()


def test_a_slot_is_reused_under_a_new_epoch_while_its_old_row_is_in_flight() -> None:
    harness = Harness(make_limits(max_running_requests=1), max_steps_in_flight=2)
    harness.submit(make_submit("old", prompt_of(5), max_tokens=9))
    old = harness.dispatch()
    harness.cancel("old")
    harness.submit(make_submit("new", prompt_of(5, 2), max_tokens=9))
    new = harness.dispatch()
    assert new.releases[0].epoch == old.rows[0].epoch
    assert new.rows[0].slot == old.rows[0].slot
    assert new.rows[0].epoch > old.rows[0].epoch
    harness.run()
    assert ("old", 0) not in harness.outputs
    assert harness.output("new").tokens == model_text(prompt_of(5, 2), 1, 9)


def test_one_sample_can_be_cancelled_alone_and_only_by_its_own_frontend() -> None:
    harness = Harness()
    harness.submit(make_submit("r", prompt_of(4), n=2))
    harness.step()
    harness.scheduler.cancel(b"another", Cancel("r"))
    harness.cancel("r", 0)
    harness.run()
    assert harness.output("r", 0).finished is None
    assert harness.output("r", 1).tokens == model_text(prompt_of(4), 2, 8)


def test_abort_ends_every_sample_even_in_the_queue() -> None:
    harness = Harness(make_limits(max_running_requests=1))
    harness.submit(make_submit("r", prompt_of(4), n=2))
    harness.step()
    harness.abort("r", "r")
    assert harness.aborted == ["r"]
    assert [harness.output("r", i).finished.reason for i in range(2)] == [FinishReason.ABORTED] * 2
    assert harness.output("r", 1).started is None
    harness.assert_idle_and_clean()


def test_an_expired_request_in_the_queue_never_reaches_a_worker() -> None:
    harness = Harness(make_limits(max_running_requests=1))
    harness.submit(make_submit("runs", prompt_of(4), max_tokens=30))
    harness.step()
    harness.submit(make_submit("expires", prompt_of(4, 2), deadline=5.0))
    assert harness.scheduler.next_deadline == 5.0
    harness.now = 5.0
    harness.run()
    assert harness.rejected["expires"].reason is ErrorReason.EXPIRED_IN_QUEUE
    assert all(admission.slot == 0 for plan in harness.plans for admission in plan.admissions)
    assert len([a for plan in harness.plans for a in plan.admissions]) == 1


def test_a_running_request_past_its_deadline_is_gone_with_the_next_plan() -> None:
    harness = Harness()
    harness.submit(make_submit("r", prompt_of(4), max_tokens=50, deadline=3.0))
    harness.step()
    harness.dispatch()
    harness.now = 3.0
    harness.deliver()
    assert harness.dispatch() is None
    rejection = harness.rejected["r"]  # without it the stream would wait for ever where the call has no timer
    assert (rejection.reason, rejection.retry_after) == (ErrorReason.EXPIRED_IN_QUEUE, None)
    assert "ran" in rejection.message
    assert harness.output("r").finished is None
    harness.assert_idle_and_clean()


def test_ended_requests_leave_no_deadline_behind() -> None:
    harness = Harness()
    for i in range(3):
        harness.submit(make_submit(str(i), prompt_of(4), deadline=1e9))
    harness.run()
    assert harness.scheduler.next_deadline is None


def test_ended_requests_leave_memory_while_one_with_an_earlier_deadline_lives() -> None:
    harness = Harness()
    harness.submit(make_submit("long", prompt_of(4), max_tokens=50, deadline=100.0))
    harness.dispatch()
    for i in range(500):
        harness.submit(make_submit(f"short{i}", prompt_of(8, i % 5), deadline=200.0 + i))
        harness.cancel(f"short{i}")
    gc.collect()  # a request and its sequences know each other
    in_memory = {o.request_id for o in gc.get_objects() if isinstance(o, Request) and o.frontend == FRONTEND}
    assert {name for name in in_memory if name.startswith("short")} == set()
    assert len(harness.scheduler._deadlines) < 100
    assert harness.scheduler.next_deadline == 100.0


def test_the_deadline_of_an_earlier_use_of_an_id_does_not_count() -> None:
    harness = Harness()
    harness.submit(make_submit("long", prompt_of(4), max_tokens=50, deadline=1.0))
    harness.submit(make_submit("r", prompt_of(4, 2), deadline=2.0))
    harness.cancel("r")
    harness.submit(make_submit("r", prompt_of(4, 3), deadline=9.0))
    harness.now = 2.0
    harness.run()
    assert harness.output("r").finished.reason is FinishReason.LENGTH


def test_lost_workers_end_every_request_with_a_status() -> None:
    harness = Harness(make_limits(max_running_requests=1))
    harness.submit(make_submit("runs", prompt_of(4)))
    harness.submit(make_submit("waits", prompt_of(4)))
    harness.dispatch()
    harness.take(harness.scheduler.reject_all(ErrorReason.WORKER_LOST, "rank 1 died"))
    assert {name: r.reason for name, r in harness.rejected.items()} == {
        "runs": ErrorReason.WORKER_LOST,
        "waits": ErrorReason.WORKER_LOST,
    }
    assert harness.scheduler.num_live_requests == 0


def test_a_frontend_that_is_gone_takes_its_requests_along() -> None:
    harness = Harness()
    harness.submit(make_submit("mine", prompt_of(4)))
    harness.scheduler.submit(b"another", make_submit("other", prompt_of(4, 2)))
    harness.scheduler.forget_frontend(b"another")
    harness.run()
    assert harness.output("mine").finished.reason is FinishReason.LENGTH
    harness.assert_idle_and_clean()


def test_the_load_adds_up() -> None:
    harness = Harness(make_limits(max_running_requests=1), acceptance=1.0)
    harness.submit(make_submit("a", prompt_of(9), max_tokens=12))
    harness.step()
    harness.submit(make_submit("b", prompt_of(9), max_tokens=5, n=2))
    load = harness.scheduler.load(7, 1.5)
    assert isinstance(load, LoadReply)
    assert (load.call_id, load.time) == (7, 1.5)
    assert (load.num_running_requests, load.num_waiting_requests) == (1, 1)
    assert load.num_waiting_tokens == 2  # two samples, eight of nine tokens cached
    assert (load.num_used_pages, load.num_cached_pages) == (3, 0)
    harness.run()
    load = harness.scheduler.load(8, 2.0)
    assert load.num_generated_tokens == 12 + 2 * 5
    assert (load.num_prompt_tokens, load.num_cached_tokens) == (27, 16)
    assert load.num_used_pages == 0
    assert load.num_cached_pages > 0
    assert load.num_steps == len(harness.plans)
    (ngram,) = load.speculation
    steps = [step for output in harness.outputs.values() for step in output.steps if step.num_draft_tokens]
    depth = max(step.draft_depth for step in steps)
    assert ngram == MethodCounters(
        SpeculationMethod.NGRAM,
        len(steps),
        sum(step.num_draft_tokens for step in steps),
        sum(step.num_accepted_tokens for step in steps),
        tuple(sum(step.draft_depth > i for step in steps) for i in range(depth)),
        tuple(sum(step.num_accepted_tokens > i for step in steps) for i in range(depth)),
    )
    assert ngram.num_accepted_tokens > 0


def test_a_load_looks_at_few_pages_however_long_the_queued_prompts_are() -> None:
    limits = make_limits(
        num_pages=600, max_context_tokens=2100, max_running_requests=2, max_batched_tokens=512
    )
    harness = Harness(limits)
    prompt = prompt_of(2001)
    harness.submit(make_submit("first", prompt, max_tokens=1))
    harness.run()
    for i in range(2):
        harness.submit(make_submit(f"runs{i}", prompt_of(5, i), max_tokens=50))
    harness.step()
    for i in range(10):
        harness.submit(make_submit(f"samples{i}", prompt, n=4))
        harness.submit(make_submit(f"longer{i}", (*prompt, i), n=1))
    cache = harness.scheduler._allocator.cache
    looks: list[object] = []

    class Known(dict[int, CacheNode]):
        def get(self, number: int) -> CacheNode | None:  # type: ignore[override]
            looks.append(number)
            return super().get(number)

    find = cache.find
    cache.find = lambda *page: looks.append(page) or find(*page)  # type: ignore[method-assign,func-returns-value]
    cache._by_prefix_id = Known(cache._by_prefix_id)
    assert harness.scheduler.load(1, 0.0).num_waiting_tokens == 10 * (4 * 1 + 2)
    assert 0 < len(looks) <= 20 * 10  # 20 requests of 500 pages, ten of them with four samples


def test_events_count_steps_and_plain_steps_carry_zeros() -> None:
    harness = Harness(make_limits(max_batched_tokens=8))
    submit = make_submit("r", prompt_of(20), max_tokens=4, method=SpeculationMethod.DISABLED, num_logprobs=2)
    harness.submit(submit)
    harness.now = 12.5
    harness.run()
    output = harness.output("r")
    assert output.started.first_scheduled_time == 12.5
    assert output.finished.num_steps == 3 + 3
    assert {(step.method, step.num_draft_tokens, step.draft_depth) for step in output.steps} == {
        (SpeculationMethod.DISABLED, 0, 0)
    }
    assert [len(logprob.top) for logprob in output.logprobs] == [2] * 4
