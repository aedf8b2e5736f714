"""MTP with one draft token, followed without lengths: the texts of speculation off, the drafts of the usual drafter."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.draft_tree import DraftTree
from gpu_worker.drafting.hidden_state import HiddenStateDrafter
from gpu_worker.drafting.mtp_one import OneTokenDrafter
from gpu_worker.models.base import CausalLM
from scheduler_svc.messages import Abort, Sampling
from scheduler_svc.scheduler.speculation_policy import SpeculationPolicy
from shared_mem.enums import AcceptanceRule, FinishReason, SpeculationMethod
from tests.exact.draft_state import SwitchingPolicy, assert_draft_state_is_fresh
from tests.exact.drafted_engines import SCRIPTED
from tests.exact.test_lossless_tiny import FEATURES, assert_equal
from tests.harness.engine import FRONTEND, GREEDY, InProcessEngine
from tests.harness.scripted_drafters import Script, ScriptedDrafter, oracle, wrong_at
from tests.harness.tiny_heads import skilled_mtp_head, tiny_head

MTP = SpeculationMethod.MTP
SEEDED = Sampling(0.7, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 5)
References = dict[tuple[int, ...], list[int]]


class Watched(OneTokenDrafter):
    """Counts what it follows without lengths, and notes all drafts."""

    num_followed = 0
    num_caught_up = 0

    def follow(self, rows, verification, hidden):  # type: ignore[no-untyped-def]
        super().follow(rows, verification, hidden)
        self.num_followed += int(self._followed.sum())

    def catch_up(self, progress, hidden):  # type: ignore[no-untyped-def]
        self.num_caught_up += len(progress) - int(self._followed.sum())
        super().catch_up(progress, hidden)


def make_engine(
    target: CausalLM,
    directory: Path,
    *,
    kind: str = "",
    drafter: type[HiddenStateDrafter] = Watched,
    script: Script | None = None,
    **settings: object,
) -> InProcessEngine:
    """One draft token a step from a head that drafts with success, or from a random one of a `kind`.

    script: what the n-gram method is to propose.
    """
    head = tiny_head(kind, target) if kind else skilled_mtp_head(target, directory)
    settings = {"num_draft_tokens": 1} | settings
    if script is not None:
        settings["scripted"] = {SCRIPTED: lambda table: ScriptedDrafter(table, script)}
    return InProcessEngine(target, heads={MTP: head}, head_drafter=drafter, **settings)  # type: ignore[arg-type]


def watched(engine: InProcessEngine) -> Watched:
    drafter = engine.drafters[MTP]
    assert isinstance(drafter, Watched)
    return drafter


def note_drafts(engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """(slot, known tokens, draft) of all drafts from now on."""
    drafter, drafts = engine.drafters[MTP], list[tuple[int, ...]]()
    propose = drafter.propose

    def noting(requests) -> DraftTree:  # type: ignore[no-untyped-def]
        tree = propose(requests)
        for request, begin, end in zip(requests, tree.indptr, tree.indptr[1:], strict=False):
            known = int(engine.table.num_tokens[request.slot])
            drafts.append((request.slot, known, *tree.tokens[begin + 1 : end].tolist()))
        return tree

    monkeypatch.setattr(drafter, "propose", noting)
    return drafts


def check_every_step(engine: InProcessEngine, kind: str, target: CausalLM) -> int:
    """Runs to the end; after each step all draft state is that of a cold pass. The number of states compared."""
    checked = 0
    drafter = watched(engine)
    while engine.step():
        for slot in np.flatnonzero(engine.table.epochs >= 0).tolist():
            if not drafter._computed[slot]:
                continue
            assert_draft_state_is_fresh(engine, kind, target, slot)
            if drafter._ready[slot] and engine.table.sampling[slot].temperature == 0:
                best = drafter._head.output.argmax(drafter._normed[slot : slot + 1])
                assert drafter._next[slot] == best[0]
            checked += 1
    return checked


@pytest.mark.parametrize("feature", [*FEATURES, "all together"])
def test_every_feature_equals_speculation_off(
    feature: str,
    tiny: CausalLM,
    tiny_model_dir: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the drafts are those of the drafter that reads lengths, token by token."""
    engine = make_engine(tiny, tiny_model_dir)
    usual = make_engine(tiny, tiny_model_dir, drafter=HiddenStateDrafter)
    plain = InProcessEngine(tiny)
    drafts, usual_drafts = note_drafts(engine, monkeypatch), note_drafts(usual, monkeypatch)
    features = FEATURES.values() if feature == "all together" else [FEATURES[feature]]
    requests: list[str] = []
    for fields in features:
        for prompt in prompts:
            settings = {"max_tokens": 20} | fields
            for each in (engine, usual, plain):
                request = each.submit(prompt, **settings)  # type: ignore[arg-type]
            requests.append(request)
    outputs, usual_outputs, expected = engine.run(), usual.run(), plain.run()
    for request in requests:
        assert_equal(outputs[request, 0], expected[request, 0])
        assert outputs[request, 0].steps == usual_outputs[request, 0].steps
    assert drafts == usual_drafts
    assert len(drafts) >= 50
    assert sum(output.num_accepted_tokens for output in outputs.values()) > 0
    assert watched(engine).num_followed > 5 * watched(engine).num_caught_up


@pytest.mark.parametrize("rule", list(AcceptanceRule))
def test_every_rule_gives_what_the_usual_drafter_gives(
    rule: AcceptanceRule,
    tiny: CausalLM,
    tiny_model_dir: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots that reject are judged on the host, and all others of their step with them."""
    texts, drafts = [], []
    for drafter in (Watched, HiddenStateDrafter):
        engine = make_engine(tiny, tiny_model_dir, drafter=drafter)
        drafts.append(note_drafts(engine, monkeypatch))
        ids = [engine.submit(prompt, max_tokens=16, sampling=SEEDED, rule=rule) for prompt in prompts[:4]]
        ids += [engine.submit(prompt, max_tokens=24) for prompt in prompts[4:]]
        outputs = engine.run()
        texts.append([outputs[request, 0].token_ids for request in ids])
    assert texts[0] == texts[1]
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 5])
@pytest.mark.parametrize("kind", ["", "mtp-published"], ids=["skilled", "published"])
def test_draft_state_equals_a_cold_pass_after_every_step(
    kind: str, page_size: int, steps_in_flight: int, tiny: CausalLM, tiny_model_dir: Path
) -> None:
    """Prompts of all lengths up to two pages, chunked prefill: rows and drafts at every place of a page."""
    generator = np.random.default_rng(5)
    prompts = [generator.integers(3, 290, n).tolist() for n in range(2, 11)]
    settings = {"page_size": page_size, "steps_in_flight": steps_in_flight, "max_batched_tokens": 16}
    engine = make_engine(tiny, tiny_model_dir, kind=kind, num_pages=400, **settings)
    for number, prompt in enumerate(prompts):
        engine.submit(prompt, max_tokens=12, sampling=SEEDED if number % 2 else GREEDY)
    assert check_every_step(engine, kind or "mtp", tiny) > 60
    assert watched(engine).num_followed > 60
    accepted = sum(output.num_accepted_tokens for output in engine.outputs.values())
    assert accepted > 3 or kind


@pytest.mark.parametrize("wrong", [True, False], ids=["wrong", "right"])
def test_another_methods_draft_is_followed_too(
    wrong: bool, tiny: CausalLM, tiny_model_dir: Path, prompts: list[list[int]], references: References
) -> None:
    """Drafts that are all right, or all wrong, between the head's own and steps without any: state as if never."""
    script = oracle(references)
    if wrong:
        script = wrong_at(1, script, tiny.config.vocab_size)
    policy: SpeculationPolicy = SwitchingPolicy([MTP, SCRIPTED, SCRIPTED], 3, most_drafts=1)
    engine = make_engine(tiny, tiny_model_dir, script=script, policy=policy)
    ids = [engine.submit(prompt, max_tokens=24) for prompt in prompts[:5]]
    assert check_every_step(engine, "mtp", tiny) > 40
    assert watched(engine).num_followed > 40
    for prompt, request in zip(prompts, ids, strict=False):
        assert engine.outputs[request, 0].token_ids == references[tuple(prompt)][:24]
    accepted = sum(output.num_accepted_tokens for output in engine.outputs.values())
    assert accepted < 8 if wrong else accepted > 15, accepted


def test_longer_drafts_of_another_method_are_followed_with_lengths(
    tiny: CausalLM, tiny_model_dir: Path, prompts: list[list[int]], references: References
) -> None:
    policy: SpeculationPolicy = SwitchingPolicy([MTP, SCRIPTED], 3, most_drafts=3)
    engine = make_engine(
        tiny, tiny_model_dir, script=oracle(references), policy=policy, num_draft_tokens=3, steps_in_flight=2
    )
    ids = [engine.submit(prompt, max_tokens=24) for prompt in prompts[:2]]
    assert check_every_step(engine, "mtp", tiny) > 15
    assert watched(engine).num_followed > 5
    assert watched(engine).num_caught_up > 5
    for prompt, request in zip(prompts, ids, strict=False):
        assert engine.outputs[request, 0].token_ids == references[tuple(prompt)][:24]


@pytest.mark.parametrize("behind", [0, 1, 6])
@pytest.mark.parametrize("kind", ["mtp", "mtp-published"])
def test_a_prefix_hit_resumes_the_draft_exactly(
    behind: int, kind: str, tiny: CausalLM, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hit leaves a page of the prompt to compute, one token or several."""
    shared = np.random.default_rng(5).integers(3, 290, 8 + behind).tolist()
    cold = make_engine(tiny, tiny_model_dir, kind=kind)
    cold_drafts = note_drafts(cold, monkeypatch)
    cold_text = cold.generate([shared], max_tokens=24)
    warm = make_engine(tiny, tiny_model_dir, kind=kind)
    warm.generate([shared[:8]], max_tokens=8)
    drafts = note_drafts(warm, monkeypatch)
    request = warm.submit(shared, max_tokens=24)
    assert check_every_step(warm, kind, tiny) > 10
    output = warm.outputs[request, 0]
    assert output.num_cached_tokens == (8 if behind else 4)
    assert ([output.token_ids], drafts) == (cold_text, cold_drafts)


def test_a_small_pool_that_preempts_changes_nothing(
    tiny: CausalLM, tiny_model_dir: Path, prompts: list[list[int]], references: References
) -> None:
    engine = make_engine(tiny, tiny_model_dir, num_pages=40, max_running_requests=6, steps_in_flight=2)
    for prompt, ids in zip(prompts, engine.generate(prompts, max_tokens=40), strict=True):
        assert ids == references[tuple(prompt)][:40]
    assert engine.scheduler.counters.num_preemptions > 0


def test_long_prompts_in_chunks_beside_decoding(
    tiny: CausalLM, tiny_model_dir: Path, prompts: list[list[int]], references: References
) -> None:
    long_prompt = np.random.default_rng(0).integers(3, 290, 150).tolist()
    plain = InProcessEngine(tiny).generate([long_prompt], max_tokens=20)[0]
    engine = make_engine(tiny, tiny_model_dir, max_batched_tokens=24)
    for prompt in [*prompts[:3], long_prompt, *prompts[3:]]:
        engine.submit(prompt, max_tokens=20)
    assert check_every_step(engine, "mtp", tiny) > 50
    texts = [output.token_ids for output in engine.outputs.values()]
    expected = [references[tuple(prompt)][:20] for prompt in prompts]
    assert sorted(texts) == sorted([plain, *expected])


def test_samples_of_one_request(tiny: CausalLM, tiny_model_dir: Path, prompts: list[list[int]]) -> None:
    """Four samples behind one prompt, each under its own noise, as without speculation."""
    engine, plain = make_engine(tiny, tiny_model_dir), InProcessEngine(tiny)
    many = [
        each.submit(prompts[5], max_tokens=24, sampling=SEEDED, seeds=(5, 6, 7, 8))
        for each in (engine, plain)
    ]
    outputs, expected = engine.run(), plain.run()
    texts = [outputs[many[0], i].token_ids for i in range(4)]
    assert texts == [expected[many[1], i].token_ids for i in range(4)]
    assert len(set(map(tuple, texts))) == 4


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("page_size", [4, 5])
def test_the_context_limit_is_reached_and_never_crossed(
    page_size: int,
    steps_in_flight: int,
    tiny: CausalLM,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of 57..63 tokens in a context of 64; the head gets no position beyond it either."""
    generator = np.random.default_rng(3)
    prompts = [generator.integers(3, 290, n).tolist() for n in range(57, 64)]
    plain = InProcessEngine(tiny, max_context_tokens=64).generate(prompts, max_tokens=100)
    settings = {"max_context_tokens": 64, "page_size": page_size, "steps_in_flight": steps_in_flight}
    engine = make_engine(tiny, tiny_model_dir, **settings)
    head, highest = watched(engine)._head, list[int]()
    forward = head.forward

    def watching(batch, *arguments, **named):  # type: ignore[no-untyped-def]
        highest.append(int(batch.positions.max()))
        return forward(batch, *arguments, **named)

    monkeypatch.setattr(head, "forward", watching)
    ids = [engine.submit(prompt, max_tokens=100) for prompt in prompts]
    outputs = engine.run()
    assert [outputs[request, 0].token_ids for request in ids] == plain
    ends = [outputs[request, 0].finished for request in ids]
    assert all(end and end.reason is FinishReason.LENGTH for end in ends)
    assert max(highest) <= 63


def test_the_heads_own_limit(tiny: CausalLM, tiny_model_dir: Path) -> None:
    """A head of 32 positions: sequences that outgrow it go on without drafts, and are no trouble to others."""
    head = skilled_mtp_head(tiny, tiny_model_dir)
    head.config = dataclasses.replace(head.config, max_position_embeddings=32)
    generator = np.random.default_rng(3)
    prompts = [generator.integers(3, 290, n).tolist() for n in (4, 26, 29, 30, 31, 32, 40)]
    engine = InProcessEngine(tiny, heads={MTP: head}, head_drafter=OneTokenDrafter, num_draft_tokens=1)
    plain = InProcessEngine(tiny).generate(prompts, max_tokens=20)
    assert engine.generate(prompts, max_tokens=20) == plain


def test_aborts_at_random_leave_every_page_free(
    tiny: CausalLM, tiny_model_dir: Path, prompts: list[list[int]], references: References
) -> None:
    generator = np.random.default_rng(11)
    engine = make_engine(tiny, tiny_model_dir, num_pages=64, steps_in_flight=2)
    live: list[tuple[str, list[int]]] = []
    aborted: set[str] = set()
    for _ in range(60):
        prompt = prompts[int(generator.integers(len(prompts)))]
        live.append((engine.submit(prompt, max_tokens=int(generator.integers(1, 40))), prompt))
        for _ in range(int(generator.integers(0, 4))):
            engine.step()
        if generator.random() < 0.3:
            victim = live[int(generator.integers(len(live)))][0]
            aborted.add(victim)
            engine._take(engine.scheduler.abort(FRONTEND, Abort(1, (victim,))))
    outputs = engine.run()
    for request, prompt in live:
        if request not in aborted:
            ids = outputs[request, 0].token_ids
            assert ids == references[tuple(prompt)][: len(ids)]
    engine.scheduler.flush_prefix_cache()
    engine.scheduler.check_integrity()
    assert engine.scheduler._allocator.ledger.num_free == engine.limits.num_pages


@pytest.mark.parametrize("most_drafts", [1, 6])
def test_methods_switched_at_random_change_nothing(
    most_drafts: int, tiny: CausalLM, tiny_model_dir: Path
) -> None:
    """A soak: head, n-gram and draft model by turns, shared prefixes, preemptions, greedy and seeded requests."""
    heads = {MTP: skilled_mtp_head(tiny, tiny_model_dir)}
    methods = [MTP, MTP, SpeculationMethod.NGRAM, SpeculationMethod.DRAFT_MODEL]
    drafted = InProcessEngine(
        tiny,
        draft=tiny.truncated(1),
        ngram=True,
        heads=heads,
        head_drafter=Watched,
        num_pages=60,
        num_draft_tokens=most_drafts,
        max_running_requests=6,
        steps_in_flight=2,
        policy=SwitchingPolicy(methods, 1, most_drafts),
    )
    plain = InProcessEngine(tiny, num_pages=256)
    generator = np.random.default_rng(8)
    stems = [generator.integers(3, 290, 12).tolist() for _ in range(4)]
    ids = []
    for number in range(60):
        stem = stems[number % len(stems)]
        prompt = stem[: int(generator.integers(4, 13))] + generator.integers(3, 290, number % 5).tolist()
        fields = {
            "max_tokens": int(generator.integers(1, 30)),
            "sampling": SEEDED if number % 2 else GREEDY,
        }
        ids.append((drafted.submit(prompt, **fields), plain.submit(prompt, **fields)))  # type: ignore[arg-type]
    outputs, expected = drafted.run(), plain.run()
    for drafted_id, plain_id in ids:
        assert outputs[drafted_id, 0].token_ids == expected[plain_id, 0].token_ids
    assert sum(output.num_accepted_tokens for output in outputs.values()) > 6
    assert any(output.num_cached_tokens for output in outputs.values())
    assert watched(drafted).num_followed > 100
    drafted.scheduler.flush_prefix_cache()
    drafted.scheduler.check_integrity()
    assert drafted.scheduler._allocator.ledger.num_free == drafted.limits.num_pages


def test_as_a_part_of_a_portfolio(
    tiny: CausalLM, tiny_model_dir: Path, prompts: list[list[int]], references: References
) -> None:
    """The portfolio verifies the head's draft or the n-gram method's; either way the head follows without lengths."""
    engine = make_engine(tiny, tiny_model_dir, ngram=True, portfolio=True)
    ids = [engine.submit(prompt, max_tokens=24) for prompt in prompts]
    assert check_every_step(engine, "mtp", tiny) > 60
    assert watched(engine).num_followed > 60
    for prompt, request in zip(prompts, ids, strict=True):
        assert engine.outputs[request, 0].token_ids == references[tuple(prompt)][:24]


def test_on_the_kernels_too(native_model: CausalLM, native_dir: Path) -> None:
    """What serves no GPU, but shows that the class knows nothing of torch models: bit for bit the usual drafter's."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 290, (n,), generator=generator).tolist() for n in (3, 8, 17)]
    steps = []
    for drafter in (OneTokenDrafter, HiddenStateDrafter):
        heads = {MTP: tiny_head("mtp", native_model)}
        engine = InProcessEngine(native_model, heads=heads, head_drafter=drafter, num_draft_tokens=1)
        ids = [engine.submit(prompt, max_tokens=16, sampling=SEEDED) for prompt in prompts]
        outputs = engine.run()
        steps.append([(outputs[request, 0].token_ids, outputs[request, 0].steps) for request in ids])
    assert steps[0] == steps[1]
