"""Who gets whose pages: common prefixes, whole prompts, samples of one request, draft KV."""

from __future__ import annotations

import pytest

from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission
from tests.scheduler.harness import Harness, make_limits, make_submit, prompt_of
from tests.scheduler.simulated_worker import model_text

DISABLED, DRAFT_MODEL = SpeculationMethod.DISABLED, SpeculationMethod.DRAFT_MODEL
EAGLE3, MTP, PORTFOLIO = SpeculationMethod.EAGLE3, SpeculationMethod.MTP, SpeculationMethod.PORTFOLIO


def admissions(harness: Harness) -> list[Admission]:
    return [admission for plan in harness.plans for admission in plan.admissions]


def test_two_common_pages_then_different_tokens() -> None:
    harness = Harness()
    common = prompt_of(8)
    first, second = (*common, 30, 31, 32), (*common, 33, 34, 35)
    harness.submit(make_submit("a", first))
    harness.run()
    harness.submit(make_submit("b", second))
    harness.run()
    assert harness.output("a").started.num_cached_tokens == 0
    assert harness.output("b").started.num_cached_tokens == 8
    assert harness.output("b").tokens == model_text(second, 1, 8)
    assert harness.worker.num_computed_tokens < 11 + 11 + 2 * 8


@pytest.mark.parametrize("length", [4, 8, 12, 9])
def test_a_fully_cached_prompt_computes_its_last_token_again(length: int) -> None:
    harness = Harness()
    for name in ("cold", "warm"):
        harness.submit(make_submit(name, prompt_of(length)))
        harness.run()
    assert harness.output("warm").started.num_cached_tokens == (length - 1) // 4 * 4
    assert (
        harness.output("warm").tokens == harness.output("cold").tokens == model_text(prompt_of(length), 1, 8)
    )


def test_generated_pages_are_reused_by_the_next_turn() -> None:
    harness = Harness()
    harness.submit(make_submit("turn1", prompt_of(6), max_tokens=11))
    harness.run()
    longer = (*prompt_of(6), *harness.output("turn1").tokens, 5, 6)
    harness.submit(make_submit("turn2", longer))
    harness.run()
    assert harness.output("turn2").started.num_cached_tokens == 16  # 16 of 17 tokens have KV


def test_salts_keep_requests_apart() -> None:
    harness = Harness()
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        harness.submit(make_submit(name, prompt_of(13), cache_salt=salt))
        harness.run()
    cached = [harness.output(name).started.num_cached_tokens for name in "abc"]
    assert cached == [0, 0, 12]


def test_without_a_prefix_cache_nothing_is_reused() -> None:
    harness = Harness(make_limits(prefix_cache=False))
    for name in ("a", "b"):
        harness.submit(make_submit(name, prompt_of(13), n=2))
        harness.run()
    assert harness.output("b", 1).started.num_cached_tokens == 0
    assert harness.scheduler._allocator.ledger.num_free == harness.limits.num_pages


def test_a_running_request_shares_pages_as_soon_as_their_step_has_retired() -> None:
    harness = Harness(make_limits(max_batched_tokens=8, max_running_requests=2))
    harness.submit(make_submit("a", prompt_of(20)))
    harness.dispatch()  # computes pages 0 and 1
    harness.submit(make_submit("b", prompt_of(20), arrival_time=1.0))
    harness.deliver()
    harness.run()
    b = admissions(harness)[1]
    assert b.num_cached_tokens >= 8
    assert harness.output("b").tokens == model_text(prompt_of(20), 1, 8)


def test_a_page_is_not_hit_while_its_step_is_in_flight() -> None:
    harness = Harness(max_steps_in_flight=2)
    harness.submit(make_submit("a", prompt_of(9)))
    harness.dispatch()
    harness.submit(make_submit("b", prompt_of(9), arrival_time=1.0))
    harness.dispatch()
    assert [admission.num_cached_tokens for admission in admissions(harness)] == [0, 0]
    harness.run()


def test_equal_pages_computed_side_by_side_are_merged() -> None:
    harness = Harness()
    for name in ("a", "b"):
        harness.submit(make_submit(name, prompt_of(13), max_tokens=10, method=SpeculationMethod.DISABLED))
    harness.step()
    ledger = harness.scheduler._allocator.ledger
    assert ledger.num_owned == 3 + 2  # three pages in common, one of its own for each
    harness.run()
    assert harness.output("a").tokens == harness.output("b").tokens == model_text(prompt_of(13), 1, 10)


def test_samples_share_the_pages_of_their_prompt() -> None:
    harness = Harness()
    harness.submit(make_submit("r", prompt_of(18), n=3))
    plan = harness.step()
    assert len(plan.admissions) == 1  # the others wait for its pages
    plan = harness.step()
    assert [admission.num_cached_tokens for admission in plan.admissions] == [16, 16]
    harness.run()
    texts = [harness.output("r", i).tokens for i in range(3)]
    assert texts == [model_text(prompt_of(18), 1 + i, 8) for i in range(3)]
    assert [harness.output("r", i).started.num_cached_tokens for i in range(3)] == [0, 16, 16]


def test_samples_of_a_prompt_below_one_page_do_not_wait() -> None:
    harness = Harness()
    harness.submit(make_submit("r", prompt_of(4), n=3))
    assert len(harness.step().admissions) == 3


def test_only_the_first_sample_computes_prompt_logprobs_and_the_others_share_its_pages() -> None:
    harness = Harness()
    harness.submit(make_submit("warm", prompt_of(18)))
    harness.run()
    harness.submit(make_submit("r", prompt_of(18), n=3, num_prompt_logprobs=2))
    harness.run()
    started = [harness.output("r", i).started for i in range(3)]
    assert [each.num_cached_tokens for each in started] == [0, 16, 16]
    assert [logprob.token_id for logprob in started[0].prompt_logprobs] == list(prompt_of(18)[1:])
    assert all(len(logprob.top) == 2 for logprob in started[0].prompt_logprobs)
    assert [each.prompt_logprobs for each in started[1:]] == [None, None]
    asked = [admission.sampling.num_prompt_logprobs for admission in admissions(harness)[1:]]
    assert asked == [2, -1, -1]
    assert [harness.output("r", i).tokens for i in range(3)] == [
        model_text(prompt_of(18), 1 + i, 8) for i in range(3)
    ]


def test_the_siblings_of_a_cancelled_first_sample_go_on() -> None:
    harness = Harness(make_limits(max_batched_tokens=8))
    harness.submit(make_submit("r", prompt_of(30), n=3))
    harness.step()
    harness.cancel("r", 0)
    harness.run()
    assert ("r", 0) not in harness.outputs
    assert [harness.output("r", i).tokens for i in (1, 2)] == [
        model_text(prompt_of(30), 1 + i, 8) for i in (1, 2)
    ]


def test_draft_kv_of_cached_pages_is_known_page_by_page() -> None:
    harness = Harness()
    harness.submit(make_submit("plain", prompt_of(13), method=SpeculationMethod.NGRAM))
    harness.run()
    harness.submit(make_submit("first", prompt_of(13), method=DRAFT_MODEL))
    harness.run()
    harness.submit(make_submit("second", prompt_of(13), method=DRAFT_MODEL))
    harness.run()
    hits = [(a.num_cached_tokens, a.num_draft_cached_tokens) for a in admissions(harness)]
    # `first` finds target KV only; its drafter fills in the shared pages, and `second` finds both
    assert hits == [(0, 0), (12, 0), (12, 12)]


def test_a_better_copy_replaces_a_page_without_draft_kv() -> None:
    """Draft KV of a running sequence is never lost to a page that lacks it."""
    harness = Harness(make_limits(max_batched_tokens=16))
    harness.submit(make_submit("drafting", prompt_of(9), max_tokens=1, method=DRAFT_MODEL))
    harness.submit(make_submit("plain", prompt_of(9), max_tokens=1, method=SpeculationMethod.DISABLED))
    harness.run()
    harness.submit(make_submit("later", prompt_of(9), max_tokens=1, method=DRAFT_MODEL))
    harness.run()
    assert admissions(harness)[-1].num_draft_cached_tokens == 8


def test_a_hit_ends_where_a_follower_lacks_kv_that_needs_hidden_states() -> None:
    harness = Harness()
    harness.submit(make_submit("short", prompt_of(9), max_tokens=1, method=EAGLE3))
    harness.run()
    harness.submit(make_submit("plain", prompt_of(17), max_tokens=1, method=DISABLED))
    harness.run()
    for name, method in (("eagle3", EAGLE3), ("again", EAGLE3), ("mtp", MTP), ("off", DISABLED)):
        harness.submit(make_submit(name, prompt_of(17), max_tokens=1, method=method))
        harness.run()
    # `plain` needs no draft KV and finds all; what `eagle3` computes again replaces the pages without its KV
    hits = [a.num_cached_tokens for a in admissions(harness)]
    assert hits == [0, 8, 8, 16, 0, 16]


def test_of_copies_with_different_draft_kv_the_newer_one_of_as_many_methods_is_kept() -> None:
    harness = Harness()
    for name, method in (("a", EAGLE3), ("b", MTP), ("c", MTP), ("d", EAGLE3), ("e", PORTFOLIO), ("f", MTP)):
        harness.submit(make_submit(name, prompt_of(13), max_tokens=1, method=method))
        harness.run()
    # the portfolio's copy holds the KV of all: it replaces the last, and everybody finds it
    assert [a.num_cached_tokens for a in admissions(harness)] == [0, 0, 12, 0, 0, 12]


def test_a_copy_with_less_draft_kv_replaces_none_that_has_more() -> None:
    harness = Harness(make_limits(max_batched_tokens=64))
    harness.submit(make_submit("all", prompt_of(13), max_tokens=1, method=PORTFOLIO))
    harness.run()
    harness.submit(make_submit("off", prompt_of(13), max_tokens=1, method=DISABLED))
    harness.submit(make_submit("part", prompt_of(13), max_tokens=1, method=MTP))
    harness.submit(make_submit("all-again", prompt_of(13), max_tokens=1, method=PORTFOLIO))
    harness.run()
    assert [a.num_cached_tokens for a in admissions(harness)] == [0, 12, 12, 12]
    assert admissions(harness)[-1].num_draft_cached_tokens == 12


def test_a_sequence_keeps_its_copy_to_itself_while_others_hold_one_without_its_draft_kv() -> None:
    harness = Harness(make_limits(max_batched_tokens=64))
    harness.submit(make_submit("plain", prompt_of(13), max_tokens=30, method=DISABLED))
    harness.submit(make_submit("mtp", prompt_of(13), max_tokens=2, method=MTP, arrival_time=1.0))
    harness.step()
    mtp = next(s for s in harness.scheduler._slots.running if s.request.request_id == "mtp")
    assert mtp.leaves_cache_alone
    harness.run()
    assert harness.output("mtp").tokens == model_text(prompt_of(13), 1, 2)


def test_an_admission_says_who_follows() -> None:
    harness = Harness()
    wishes = {"off": DISABLED, "default": None, "mtp": MTP, "portfolio": PORTFOLIO}
    for name, method in wishes.items():
        harness.submit(make_submit(name, prompt_of(3), max_tokens=1, method=method))
        harness.run()
    harness.submit(make_submit("none", prompt_of(3), max_tokens=1, method=MTP, max_draft_tokens=0))
    harness.run()
    everybody = sum(method.bit for method in harness.limits.drafters)
    expected = [0, SpeculationMethod.NGRAM.bit, MTP.bit, everybody, 0]
    assert [a.methods for a in admissions(harness)] == expected


def test_evicted_prefixes_are_computed_again() -> None:
    harness = Harness(make_limits(num_pages=8, max_context_tokens=32))
    for i in range(4):
        harness.submit(make_submit(f"{i}", prompt_of(13, i)))
        harness.run()
    harness.submit(make_submit("again", prompt_of(13, 0)))
    harness.run()
    assert harness.output("again").started.num_cached_tokens == 0
    assert harness.output("again").tokens == harness.output("0").tokens
    harness.assert_idle_and_clean()
