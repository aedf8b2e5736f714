"""Every way of drafting x every sampling feature gives what speculation off gives, ids and log-probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpu_worker.models.base import CausalLM
from scheduler_svc.messages import Sampling, Stopping
from shared_mem.enums import AcceptanceRule, FinishReason, SpeculationMethod
from tests.exact.drafted_engines import HEAD_NAMES, NAMES, make_engine
from tests.harness.engine import GREEDY, InProcessEngine, Output

References = dict[tuple[int, ...], list[int]]

FEATURES: dict[str, dict[str, object]] = {
    "greedy": {},
    "temperature": {"sampling": Sampling(1.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 42)},
    "truncated": {"sampling": Sampling(0.8, 20, 0.9, 0.02, 0.0, 0.0, 1.0, 7)},
    "penalties": {"sampling": Sampling(0.0, 0, 1.0, 0.0, 0.5, 0.7, 1.3, 0)},
    "penalties at temperature 1": {"sampling": Sampling(1.0, 0, 1.0, 0.0, 0.5, 0.7, 1.3, 3)},
    "bias": {"sampling": Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, ((17, 4.0), (40, -100.0)))},
    "min_p": {"sampling": Sampling(1.0, 0, 1.0, 0.3, 0.0, 0.0, 1.0, 9)},
    "logprobs": {"num_logprobs": 3},
    "prompt logprobs": {"num_logprobs": 0, "num_prompt_logprobs": 2},
    "min_tokens": {"stopping": Stopping(24, min_tokens=9, stop_token_ids=tuple(range(3, 120)))},
    "stop ids": {"stopping": Stopping(40, stop_token_ids=tuple(range(3, 60)))},
}


def assert_equal(drafted: Output, plain: Output) -> None:
    """Ids, log-probabilities and the end."""
    assert drafted.token_ids == plain.token_ids
    assert drafted.finished is not None
    assert plain.finished is not None
    assert (drafted.finished.reason, drafted.finished.stop_token_id) == (
        plain.finished.reason,
        plain.finished.stop_token_id,
    )
    assert len(drafted.logprobs) == len(plain.logprobs)
    for a, b in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert a.token_id == b.token_id
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert [t for t, _ in a.top] == [t for t, _ in b.top]
    if plain.prompt_logprobs is not None:
        assert drafted.prompt_logprobs is not None
        assert [p.token_id for p in drafted.prompt_logprobs] == [p.token_id for p in plain.prompt_logprobs]
        np.testing.assert_allclose(
            [p.logprob for p in drafted.prompt_logprobs],
            [p.logprob for p in plain.prompt_logprobs],
            atol=1e-4,
        )


@pytest.mark.parametrize("name", [*NAMES, *HEAD_NAMES])
def test_every_feature_equals_speculation_off(
    name: str, tiny: CausalLM, tiny_model_dir: Path, prompts: list[list[int]], references: References
) -> None:
    """Each prompt with each feature, all in one batch of mixed requests."""
    drafted = make_engine(name, tiny, references, tiny_model_dir)
    plain = InProcessEngine(tiny)
    ids: list[tuple[str, str, str]] = []
    for feature, fields in FEATURES.items():
        for prompt in prompts:
            settings = {"max_tokens": 20} | fields
            ids.append((feature, drafted.submit(prompt, **settings), plain.submit(prompt, **settings)))  # type: ignore[arg-type]
    drafted_outputs, plain_outputs = drafted.run(), plain.run()
    for _, drafted_id, plain_id in ids:
        assert_equal(drafted_outputs[drafted_id, 0], plain_outputs[plain_id, 0])
    proposed = sum(output.num_draft_tokens for output in drafted_outputs.values())
    accepted = sum(output.num_accepted_tokens for output in drafted_outputs.values())
    assert proposed > 0
    if name.startswith("oracle"):
        assert accepted > 100
    assert drafted.num_steps <= plain.num_steps


@pytest.mark.parametrize("name", ["ngram", "draft-model", "oracle", "wrong-at-2", "junk", "oracle-tree"])
@pytest.mark.parametrize("rule", [AcceptanceRule.REJECTION, AcceptanceRule.TYPICAL, AcceptanceRule.THRESHOLD])
def test_greedy_is_lossless_under_every_rule(
    name: str, rule: AcceptanceRule, tiny: CausalLM, prompts: list[list[int]], references: References
) -> None:
    """At temperature 0 the target's law is one token, whatever the rule."""
    engine = make_engine(name, tiny, references)
    for prompt, ids in zip(prompts, engine.generate(prompts, max_tokens=32, rule=rule), strict=True):
        assert ids == references[tuple(prompt)][:32]


@pytest.mark.parametrize("name", ["oracle", "oracle-tree"])
def test_a_perfect_drafter_is_always_accepted(
    name: str, tiny: CausalLM, prompts: list[list[int]], references: References
) -> None:
    """Four drafts a step are kept in full; the last steps have fewer tokens left than a tree has nodes."""
    engine = make_engine(name, tiny, references, max_batched_tokens=256)
    ids = [engine.submit(prompt, max_tokens=42) for prompt in prompts]
    outputs = engine.run()
    for request_id in ids:
        steps = outputs[request_id, 0].steps
        assert [accepted for _, accepted in steps[1:7]] == [4] * 6
        assert outputs[request_id, 0].num_accepted_tokens == 42 - len(steps)


@pytest.mark.parametrize("name", NAMES)
def test_small_pool_forces_preemption_and_changes_nothing(
    name: str, tiny: CausalLM, prompts: list[list[int]], references: References
) -> None:
    engine = make_engine(name, tiny, references, num_pages=40, max_running_requests=6)
    outputs = engine.generate(prompts, max_tokens=40)
    for prompt, ids in zip(prompts, outputs, strict=True):
        assert ids == references[tuple(prompt)][:40]
    assert engine.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("name", NAMES)
def test_warm_prefix_cache_changes_nothing(
    name: str, tiny: CausalLM, prompts: list[list[int]], references: References
) -> None:
    engine = make_engine(name, tiny, references)
    engine.generate(prompts, max_tokens=24)
    ids = [engine.submit(prompt, max_tokens=40) for prompt in prompts]
    outputs = engine.run()
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert outputs[request_id, 0].token_ids == references[tuple(prompt)][:40]
        assert outputs[request_id, 0].num_cached_tokens == (len(prompt) - 1) // 4 * 4


@pytest.mark.parametrize("beside_prefill", [True, False])
def test_long_prompts_in_chunks_beside_decoding(
    beside_prefill: bool, tiny: CausalLM, references: References, prompts: list[list[int]]
) -> None:
    """Chunks of a long prompt share steps with decode rows that draft (or wait with drafting)."""
    long_prompt = np.random.default_rng(0).integers(3, 290, 150).tolist()
    plain = InProcessEngine(tiny).generate([long_prompt], max_tokens=20)[0]
    engine = make_engine(
        "draft-model", tiny, references, max_batched_tokens=24, drafts_beside_prefill=beside_prefill
    )
    ids = engine.generate([*prompts[:3], long_prompt, *prompts[3:]], max_tokens=20)
    assert ids[3] == plain
    for prompt, generated in zip(prompts, ids[:3] + ids[4:], strict=True):
        assert generated == references[tuple(prompt)][:20]


def test_samples_of_one_request_differ_and_the_first_is_the_single_one(
    tiny: CausalLM, prompts: list[list[int]]
) -> None:
    engine = InProcessEngine(tiny, ngram=True)
    sampling = Sampling(1.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 5)
    many = engine.submit(prompts[5], max_tokens=12, sampling=sampling, seeds=(5, 60, 61, 62))
    outputs = engine.run()
    texts = [tuple(outputs[many, i].token_ids) for i in range(4)]
    assert len(set(texts)) == 4
    assert (
        outputs[many, 3].num_cached_tokens == (len(prompts[5]) - 1) // 4 * 4
    )  # the prompt's pages are shared
    single = engine.submit(prompts[5], max_tokens=12, sampling=sampling)
    assert tuple(engine.run()[single, 0].token_ids) == texts[0]


def test_seeded_text_does_not_depend_on_company(tiny: CausalLM, prompts: list[list[int]]) -> None:
    """seed 42 at temperature 2: alone, in a batch of four, on an aged server, beside one that drafts nothing."""
    sampling = Sampling(2.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 42)
    fresh = InProcessEngine(tiny, ngram=True)
    alone = fresh.generate([prompts[6]], max_tokens=10, sampling=sampling)[0]
    assert fresh.generate([prompts[6]], max_tokens=10, sampling=sampling)[0] == alone
    engine = InProcessEngine(tiny, ngram=True, draft=tiny.truncated(1))
    for prompt in prompts:
        engine.submit(prompt, max_tokens=17, sampling=Sampling(1.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 8))
    engine.run()
    batch = engine.generate([prompts[6]] * 4, max_tokens=10, sampling=sampling)
    assert batch == [alone] * 4
    first = engine.submit(prompts[6], max_tokens=10, sampling=sampling, method=SpeculationMethod.DRAFT_MODEL)
    engine.submit(prompts[0], max_tokens=10, method=SpeculationMethod.DISABLED)
    assert engine.run()[first, 0].token_ids == alone


class TestEndsInsideAnAcceptedRun:
    """A perfect drafter of five tokens: the run of the first verification step holds tokens 2..7 of the text."""

    @pytest.fixture
    def text(self, prompts: list[list[int]], references: References) -> list[int]:
        text = references[tuple(prompts[3])]
        assert len(set(text[:7])) == 7, "the positions below must be first occurrences"
        return text

    def _run(
        self, tiny: CausalLM, references: References, prompt: list[int], stopping: Stopping
    ) -> tuple[list[int], FinishReason]:
        engine = make_engine("oracle", tiny, references, num_draft_tokens=5)
        request = engine.submit(prompt, stopping=stopping)
        output = engine.run()[request, 0]
        assert output.finished is not None
        return output.token_ids, output.finished.reason

    def test_a_stop_id_before_max_tokens(
        self, tiny: CausalLM, references: References, prompts: list[list[int]], text: list[int]
    ) -> None:
        got = self._run(tiny, references, prompts[3], Stopping(5, stop_token_ids=(text[2],)))
        assert got == (text[:3], FinishReason.STOP)

    def test_a_stop_id_after_max_tokens(
        self, tiny: CausalLM, references: References, prompts: list[list[int]], text: list[int]
    ) -> None:
        got = self._run(tiny, references, prompts[3], Stopping(5, stop_token_ids=(text[5],)))
        assert got == (text[:5], FinishReason.LENGTH)

    def test_a_stop_id_at_max_tokens(
        self, tiny: CausalLM, references: References, prompts: list[list[int]], text: list[int]
    ) -> None:
        stopping = Stopping(5, stop_token_ids=(text[4],))
        plain = InProcessEngine(tiny)
        request = plain.submit(prompts[3], stopping=stopping)
        reference = plain.run()[request, 0]
        assert reference.finished is not None
        got = self._run(tiny, references, prompts[3], stopping)
        assert got == (reference.token_ids, reference.finished.reason) == (text[:5], FinishReason.STOP)

    def test_end_of_text_in_the_run(
        self, tiny: CausalLM, references: References, prompts: list[list[int]], text: list[int]
    ) -> None:
        engine = make_engine("oracle", tiny, references, num_draft_tokens=5, eos_token_ids=(text[3],))
        for max_tokens in range(2, 9):
            request = engine.submit(prompts[3], stopping=Stopping(max_tokens))
            output = engine.run()[request, 0]
            assert output.token_ids == text[: min(4, max_tokens)]
            assert output.finished is not None
            assert output.finished.reason is (FinishReason.EOS if max_tokens >= 4 else FinishReason.LENGTH)


def test_min_tokens_keeps_the_end_away(tiny: CausalLM, prompts: list[list[int]]) -> None:
    """With the end of text most likely everywhere, min_tokens=12 makes token 13 the first possible end."""
    eos = 2
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, ((eos, 100.0),))
    engine = InProcessEngine(tiny, ngram=True, eos_token_ids=(eos,))
    request = engine.submit(prompts[6], sampling=sampling, stopping=Stopping(40, min_tokens=12))
    output = engine.run()[request, 0]
    assert output.finished is not None
    assert output.finished.reason is FinishReason.EOS
    assert output.token_ids.index(eos) == 12
    assert len(output.token_ids) == 13


def test_a_banned_token_that_the_drafter_always_proposes_never_comes(
    tiny: CausalLM, prompts: list[list[int]], references: References
) -> None:
    prompt = prompts[4]
    banned = references[tuple(prompt)][1]
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, ((banned, -100.0),))
    drafted = make_engine("oracle", tiny, references).generate([prompt], max_tokens=16, sampling=sampling)[0]
    assert banned not in drafted
    assert drafted == InProcessEngine(tiny).generate([prompt], max_tokens=16, sampling=sampling)[0]


def test_min_p_of_one_is_greedy(tiny: CausalLM, prompts: list[list[int]], references: References) -> None:
    sampling = Sampling(1.0, 0, 1.0, 1.0, 0.0, 0.0, 1.0, 123)
    engine = make_engine("draft-model", tiny, references)
    for prompt, ids in zip(prompts, engine.generate(prompts, max_tokens=24, sampling=sampling), strict=True):
        assert ids == references[tuple(prompt)][:24]


def test_context_limit_is_reached_and_never_crossed(
    tiny: CausalLM, references: References, prompts: list[list[int]]
) -> None:
    """Prompts of 57..63 tokens in a context of 64: total 64 at most, as without speculation, finish LENGTH."""
    generator = np.random.default_rng(3)
    for length in range(57, 64):
        prompt = generator.integers(3, 290, length).tolist()
        plain = InProcessEngine(tiny, max_context_tokens=64)
        reference = plain.generate([prompt], max_tokens=100)[0]
        assert len(reference) == 64 - length
        for name in ("draft-model", "ngram", "junk", "junk-tree"):
            engine = make_engine(name, tiny, references, max_context_tokens=64)
            request = engine.submit(prompt, max_tokens=100)
            output = engine.run()[request, 0]
            assert output.token_ids == reference
            assert output.finished is not None
            assert output.finished.reason is FinishReason.LENGTH


def test_aborts_at_random_leave_every_page_free(
    tiny: CausalLM, prompts: list[list[int]], references: References
) -> None:
    """Requests that end in every way, some aborted in mid-flight; afterwards the pool is as it was."""
    from scheduler_svc.messages import Abort, Cancel
    from tests.harness.engine import FRONTEND

    generator = np.random.default_rng(11)
    engine = make_engine("wrong-at-2", tiny, references, num_pages=64)
    free_before = engine.scheduler._allocator.ledger.num_available
    live: list[str] = []
    for _ in range(120):
        prompt = prompts[int(generator.integers(len(prompts)))]
        live.append(engine.submit(prompt, max_tokens=int(generator.integers(1, 40)), sampling=GREEDY))
        for _ in range(int(generator.integers(0, 4))):
            engine.step()
        if generator.random() < 0.2:
            victim = live[int(generator.integers(len(live)))]
            engine._take(engine.scheduler.abort(FRONTEND, Abort(1, (victim,))))
        if generator.random() < 0.1:
            engine.scheduler.cancel(FRONTEND, Cancel(live[int(generator.integers(len(live)))]))
    engine.run()
    engine.scheduler.flush_prefix_cache()
    engine.scheduler.check_integrity()
    assert engine.scheduler._allocator.ledger.num_available == free_before
    assert engine.scheduler.num_live_requests == 0
