"""Random requests on too few pages: the ledger adds up after every step, texts and KV are what they should be.

Who follows a sequence is drawn at its admission, who drafts for it in every step; now and then an operator changes
the settings or flushes the cache.
"""

from __future__ import annotations

import random

import pytest

from scheduler_svc.errors import ErrorReason
from scheduler_svc.messages import SetSpeculation, Submit
from scheduler_svc.scheduler.stopping import EndRules, find_end
from shared_mem.control import DrafterFacts
from shared_mem.enums import FinishReason, SpeculationMethod
from tests.scheduler.harness import EOS, Harness, SwitchingSpeculation, make_limits, make_submit
from tests.scheduler.simulated_worker import VOCAB_SIZE, model_text

_DRAFT = SpeculationMethod.DRAFT_MODEL
_METHODS = (
    SpeculationMethod.NGRAM,
    _DRAFT,
    SpeculationMethod.EAGLE3,
    SpeculationMethod.MTP,
    SpeculationMethod.PORTFOLIO,
)


def expected(submit: Submit, index: int, max_context_tokens: int) -> tuple[list[int], FinishReason]:
    """Text and finish reason, token by token."""
    stopping = submit.stopping
    text = model_text(submit.token_ids, submit.seeds[index], stopping.max_tokens)
    rules = EndRules(
        frozenset() if stopping.ignore_eos else frozenset({EOS}),
        frozenset(stopping.stop_token_ids),
        stopping.min_tokens,
        stopping.max_tokens,
        max_context_tokens,
        len(submit.token_ids),
    )
    for i, token in enumerate(text):
        _, end = find_end(rules, i, [token])
        if end is not None:
            return text[: i + 1], end.reason
    raise AssertionError("max_tokens ends every text")


def random_submit(rng: random.Random, number: int, now: float, prefixes: list[tuple[int, ...]]) -> Submit:
    prompt = (*rng.choice(prefixes), *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))))
    return make_submit(
        f"r{number}",
        prompt,
        max_tokens=rng.choice((1, 2, 5, 12, 30, 60)),
        n=rng.choice((1, 1, 1, 1, 2, 3)),
        seed=rng.randrange(1 << 32),
        method=rng.choice((None, SpeculationMethod.DISABLED, _DRAFT, *_METHODS)),
        max_draft_tokens=rng.choice((None, None, 0, 1, 7, 16)),
        ignore_eos=rng.random() < 0.3,
        min_tokens=rng.choice((0, 0, 0, 1, 4)),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice((0, 0, 1, 2)))),
        arrival_time=now,
        deadline=now + rng.uniform(0.0, 20.0) if rng.random() < 0.15 else None,
        priority=rng.choice((-1, 0, 0, 0, 1)),
        cache_salt=rng.choice(("", "", "other")),
        num_logprobs=rng.choice((None, None, 0, 2)),
        num_prompt_logprobs=rng.choice((None, None, None, None, 1)),
    )


@pytest.mark.parametrize(
    ("num_requests", "max_steps_in_flight", "num_pages", "tree_width", "switches", "changes"),
    [
        (1000, 1, 18, 1, True, {}),
        (1000, 2, 18, 1, True, {}),
        (1000, 3, 24, 2, True, {}),
        (500, 2, 40, 1, True, {"max_running_requests": 12}),
        (500, 2, 18, 1, False, {}),
        (300, 1, 16, 3, False, {"max_batched_tokens": 8, "drafts_beside_prefill": False}),
        (300, 2, 16, 3, True, {"max_batched_tokens": 8, "drafts_beside_prefill": False}),
        (300, 2, 20, 1, True, {"page_size": 3, "max_context_tokens": 59}),
        (200, 3, 20, 1, True, {"prefix_cache": False}),
        (200, 1, 24, 1, True, {"max_running_requests": 12}),
        (200, 3, 24, 1, False, {"max_running_requests": 12}),
    ],
)
def test_random_requests_on_a_small_pool(
    num_requests: int,
    max_steps_in_flight: int,
    num_pages: int,
    tree_width: int,
    switches: bool,
    changes: dict[str, object],
) -> None:
    hidden = (SpeculationMethod.EAGLE3, SpeculationMethod.MTP)
    drafters = {
        method: DrafterFacts(
            int(method),
            method.label,
            6 if method is _DRAFT else 16,
            40 if method is _DRAFT else 0,
            needs_hidden=method in hidden,
        )
        for method in _METHODS
    }
    limits = make_limits(
        **{"max_context_tokens": min(64, num_pages * 4)} | changes,
        num_pages=num_pages,
        max_queued_requests=20,
        drafters=drafters,
    )
    rng = random.Random(num_requests * 31 + num_pages)
    policy = SwitchingSpeculation(limits, num_requests) if switches else None
    harness = Harness(limits, max_steps_in_flight, policy, seed=5, tree_width=tree_width)
    scheduler = harness.scheduler
    prefixes = [
        tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)) for length in (0, 3, 8, 9, 16, 21, 30)
    ]
    submits: dict[str, Submit] = {}
    cut_short: set[str] = set()
    while len(submits) < num_requests or scheduler.num_live_requests:
        harness.now += rng.expovariate(2.0)
        for _ in range(rng.choice((0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2))):
            if len(submits) < num_requests:
                submit = random_submit(rng, len(submits), harness.now, prefixes)
                submits[submit.request_id] = submit
                harness.submit(submit)
        harness.dispatch()
        for chance, act in ((0.06, harness.abort), (0.06, harness.cancel)):
            live = list(scheduler._requests)
            if live and rng.random() < chance:
                victim = rng.choice(live)
                cut_short.add(victim)
                if act is harness.cancel and rng.random() < 0.3:
                    harness.cancel(victim, 0)
                else:
                    act(victim)
        if rng.random() < 0.03:
            change = SetSpeculation(
                0,
                rng.choice((None, SpeculationMethod.DISABLED, *_METHODS)),
                rng.choice((None, 1, 8, 16)),
                rng.choice((None, 0, 3)),
            )
            scheduler.set_speculation(change)
        if rng.random() < 0.02:
            scheduler.flush_prefix_cache()
            scheduler.check_integrity()
        if harness.num_in_flight >= max_steps_in_flight or rng.random() < 0.5:
            while harness.num_in_flight and (
                rng.random() < 0.7 or harness.num_in_flight >= max_steps_in_flight
            ):
                harness.deliver()
    while harness.num_in_flight:
        harness.deliver()

    assert scheduler.counters.num_preemptions > 0
    assert (harness.worker.num_rows_ahead > 0) == (max_steps_in_flight > 1)
    assert (
        harness.rejected or limits.max_running_requests > 8
    )  # with so many slots the queue may never be full
    reasons = {rejected.reason for rejected in harness.rejected.values()}
    assert reasons <= {ErrorReason.QUEUE_FULL, ErrorReason.EXPIRED_IN_QUEUE}
    num_complete = num_cached = 0
    for submit in submits.values():
        for index in range(len(submit.seeds)):
            output = harness.outputs.get((submit.request_id, index))
            if output is None:
                assert (
                    submit.request_id in harness.rejected or submit.request_id in cut_short or submit.deadline
                )
                continue
            text, reason = expected(submit, index, limits.max_context_tokens)
            assert output.tokens == text[: len(output.tokens)]
            if output.finished is None or output.finished.reason is FinishReason.ABORTED:
                assert submit.request_id in cut_short or submit.deadline is not None
            else:
                assert (output.tokens, output.finished.reason) == (text, reason)
                num_complete += 1
            if output.started is not None:
                num_cached += output.started.num_cached_tokens
                if submit.num_prompt_logprobs is None or index > 0:
                    assert output.started.prompt_logprobs is None
                else:
                    assert output.started.prompt_logprobs is not None
                    logged = [logprob.token_id for logprob in output.started.prompt_logprobs]
                    assert logged == list(submit.token_ids[1:])
                    assert output.started.num_cached_tokens == 0
            assert len(output.logprobs) == (0 if submit.num_logprobs is None else len(output.tokens))
    assert num_complete > num_requests / 3
    assert (num_cached > 0) == limits.prefix_cache
    delivered = sum(len(output.tokens) for output in harness.outputs.values())
    assert scheduler.counters.num_generated_tokens == delivered
    harness.assert_idle_and_clean()
