"""Heads that read the target's hidden states: state after rejections, hits and switches, at page and context ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_worker.drafting.hidden_state import HiddenStateDrafter
from gpu_worker.drafting.tree_growth import CHAINS, TreeShape
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.models.base import CausalLM
from scheduler_svc.messages import Sampling
from shared_mem.enums import SpeculationMethod
from tests.exact.draft_state import SwitchingPolicy, assert_draft_state_is_fresh, drafter_of
from tests.exact.drafted_engines import METHOD_OF_HEAD
from tests.exact.drafted_engines import make_engine as engine_of
from tests.harness.engine import InProcessEngine
from tests.harness.tiny_heads import KINDS, SHIPPED_KINDS, SKILLED, tiny_head, tiny_medusa

SEEDED = Sampling(0.7, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 5)
ALL_KINDS = (*KINDS, *SHIPPED_KINDS)
TREE = TreeShape(max_depth=3, max_children=4)


def make_engine(
    kind: str, tiny: CausalLM, directory: Path, tree: TreeShape = CHAINS, **settings: object
) -> InProcessEngine:
    """An engine that drafts with a head of that kind."""
    head = tiny_head(kind, tiny, directory)
    settings = {"num_draft_tokens": 4 if tree.is_chain else 9} | settings
    return InProcessEngine(tiny, heads={METHOD_OF_HEAD[kind]: head}, tree=tree, **settings)  # type: ignore[arg-type]


def test_medusa_hits_pages_of_anybody(tiny: CausalLM, prompts: list[list[int]]) -> None:
    """It has no KV that a page could lack: the hidden state it needs is that of the last token, always computed."""
    cold = InProcessEngine(tiny, medusa=tiny_medusa(tiny))
    cold_id = cold.submit(prompts[5], max_tokens=24)
    cold_output = cold.run()[cold_id, 0]
    warm = InProcessEngine(tiny, medusa=tiny_medusa(tiny))
    warm.generate([prompts[5]], max_tokens=8, method=SpeculationMethod.DISABLED)
    warm_id = warm.submit(prompts[5], max_tokens=24)
    output = warm.run()[warm_id, 0]
    assert output.num_cached_tokens == (len(prompts[5]) - 1) // 4 * 4
    assert (output.token_ids, output.steps) == (cold_output.token_ids, cold_output.steps)


@pytest.mark.parametrize("tree", [CHAINS, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_draft_state_equals_a_cold_pass_after_every_step(
    kind: str, tree: TreeShape, tiny: CausalLM, tiny_model_dir: Path, prompts: list[list[int]]
) -> None:
    """Chunked prefill, then accepted and rejected runs at temperature 0.7: nothing provisional survives."""
    engine = make_engine(kind, tiny, tiny_model_dir, tree, max_batched_tokens=16)
    engine.submit(prompts[5], max_tokens=24, sampling=SEEDED)
    engine.submit(prompts[6], max_tokens=24, sampling=SEEDED)
    checked = 0
    while engine.step():
        for slot in np.flatnonzero(engine.table.epochs >= 0).tolist():
            if drafter_of(engine, kind)._computed[slot]:
                assert_draft_state_is_fresh(engine, kind, tiny, slot)
                checked += 1
    assert checked > 20
    outputs = engine.outputs.values()
    if kind in SKILLED:
        assert sum(output.num_accepted_tokens for output in outputs) > 0


@pytest.mark.parametrize("extra", [0, 6], ids=["whole prompt", "two pages"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_prefix_hit_resumes_the_draft_exactly(
    kind: str, extra: int, tiny: CausalLM, tiny_model_dir: Path
) -> None:
    """Two prompts share exactly two full pages, or are the same and a multiple of the page: as in a cold run."""
    generator = np.random.default_rng(5)
    shared = generator.integers(3, 290, 8).tolist()
    first = shared + generator.integers(3, 290, extra).tolist()
    second = shared + generator.integers(3, 290, extra + 1 if extra else 0).tolist()
    cold = make_engine(kind, tiny, tiny_model_dir)
    cold_id = cold.submit(second, max_tokens=24)
    cold_output = cold.run()[cold_id, 0]
    warm = make_engine(kind, tiny, tiny_model_dir)
    warm.generate([first], max_tokens=8)
    warm_id = warm.submit(second, max_tokens=24)
    warm.step()
    slot = int(np.flatnonzero(warm.table.epochs >= 0)[0])
    assert int(drafter_of(warm, kind)._computed[slot]) == len(second) + 1
    assert_draft_state_is_fresh(warm, kind, tiny, slot)
    warm_output = warm.run()[warm_id, 0]
    assert warm_output.num_cached_tokens == (8 if extra else 4)
    assert warm_output.token_ids == cold_output.token_ids
    assert warm_output.steps == cold_output.steps


@pytest.mark.parametrize("tree", [CHAINS, TREE], ids=["chain", "tree"])
def test_medusa_drafts_behind_a_prefix_hit_as_in_a_cold_run(tree: TreeShape, tiny: CausalLM) -> None:
    """Two prompts share exactly two full pages, then differ."""
    first, second = _sharing_two_pages()
    outputs = []
    for before in ([], [first]):
        engine = InProcessEngine(tiny, medusa=tiny_medusa(tiny), tree=tree)
        engine.generate(before, max_tokens=8)
        request = engine.submit(second, max_tokens=24)
        outputs.append(engine.run()[request, 0])
    cold, warm = outputs
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 8)
    assert warm.num_draft_tokens > 0
    assert (warm.token_ids, warm.steps) == (cold.token_ids, cold.steps)


@pytest.mark.parametrize("tree", [CHAINS, TREE], ids=["chain", "tree"])
def test_every_part_of_a_portfolio_resumes_behind_a_prefix_hit(
    tree: TreeShape, tiny: CausalLM, tiny_model_dir: Path
) -> None:
    """Two prompts share exactly two full pages, then differ: a cold run's text, each head's state a fresh one."""
    kinds = ("eagle3", "mtp", "eagle-full")
    heads = {METHOD_OF_HEAD[kind]: tiny_head(kind, tiny, tiny_model_dir) for kind in kinds}
    first, second = _sharing_two_pages()
    plain = InProcessEngine(tiny).generate([second], max_tokens=24)
    engine = InProcessEngine(
        tiny,
        draft=tiny.truncated(1),
        ngram=True,
        heads=heads,
        medusa=tiny_medusa(tiny),
        tree=tree,
        portfolio=True,
        num_draft_tokens=9,
    )
    engine.generate([first], max_tokens=8)
    request = engine.submit(second, max_tokens=24)
    checked = 0
    while engine.step():
        for slot in np.flatnonzero(engine.table.epochs >= 0).tolist():
            for kind in kinds:
                assert drafter_of(engine, kind)._computed[slot] > len(second)
                assert_draft_state_is_fresh(engine, kind, tiny, slot)
                checked += 1
    output = engine.outputs[request, 0]
    assert checked > 8 * len(kinds)
    assert output.num_cached_tokens == 8
    assert 0 < output.num_accepted_tokens < output.num_draft_tokens
    assert [output.token_ids] == plain


def _sharing_two_pages() -> tuple[list[int], list[int]]:
    generator = np.random.default_rng(5)
    shared = generator.integers(3, 290, 8).tolist()
    return shared + generator.integers(3, 290, 6).tolist(), shared + generator.integers(3, 290, 7).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_one_token_behind_a_prefix_hit(kind: str, tiny: CausalLM, tiny_model_dir: Path) -> None:
    """Its row looks like that of a decoding sequence, yet its first pair needs the hidden state of the page's end."""
    shared = np.random.default_rng(5).integers(3, 290, 8).tolist()
    engine = make_engine(kind, tiny, tiny_model_dir)
    engine.generate([shared], max_tokens=8)
    request = engine.submit([*shared, 17], max_tokens=24)
    engine.step()
    slot = int(np.flatnonzero(engine.table.epochs >= 0)[0])
    assert int(drafter_of(engine, kind)._computed[slot]) == len(shared) + 2
    assert_draft_state_is_fresh(engine, kind, tiny, slot)
    assert engine.run()[request, 0].num_cached_tokens == 8


@pytest.mark.parametrize("kind", ["eagle-full", "eagle3", "mtp"])
def test_pages_without_the_heads_kv_are_computed_again(
    kind: str, tiny: CausalLM, tiny_model_dir: Path, prompts: list[list[int]]
) -> None:
    """A prefix that was computed with speculation off holds no draft KV: the target makes its hidden states anew."""
    cold = make_engine(kind, tiny, tiny_model_dir)
    cold_id = cold.submit(prompts[5], max_tokens=24)
    cold_output = cold.run()[cold_id, 0]
    engine = make_engine(kind, tiny, tiny_model_dir)
    engine.generate([prompts[5]], max_tokens=8, method=SpeculationMethod.DISABLED)
    first = engine.submit(prompts[5], max_tokens=24)
    output = engine.run()[first, 0]
    assert output.num_cached_tokens == 0
    assert (output.token_ids, output.steps) == (cold_output.token_ids, cold_output.steps)
    second = engine.submit(prompts[5], max_tokens=24)  # the better copies took the old ones' place
    output = engine.run()[second, 0]
    assert output.num_cached_tokens > 0
    assert (output.token_ids, output.steps) == (cold_output.token_ids, cold_output.steps)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", [*ALL_KINDS, "medusa", "portfolio"])
def test_the_context_limit_holds(
    kind: str, shape: str, tiny: CausalLM, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 57..63 tokens in a context of 64: as without speculation, and no position reaches the limit."""
    generator = np.random.default_rng(3)
    prompts = [generator.integers(3, 290, n).tolist() for n in range(57, 64)]
    plain = InProcessEngine(tiny, max_context_tokens=64).generate(prompts, max_tokens=100)
    target_positions = _watched(tiny, ("forward", "forward_capturing"), monkeypatch)
    # all prompts fit one step, which otherwise leaves no rows for drafts before the sequences end
    settings = {"max_context_tokens": 64, "steps_in_flight": 2, "max_batched_tokens": 512}
    engine = engine_of(f"{kind}/{shape}", tiny, {}, tiny_model_dir, **settings)
    heads = [drafter._head for drafter in engine.drafters.values() if isinstance(drafter, HiddenStateDrafter)]
    head_positions = [_watched(head, ("forward",), monkeypatch) for head in heads]
    assert len(heads) == (kind != "medusa")
    ids = [engine.submit(prompt, max_tokens=100) for prompt in prompts]
    outputs = engine.run()
    assert [outputs[request, 0].token_ids for request in ids] == plain
    assert all(len(prompt) + len(ids) == 64 for prompt, ids in zip(prompts, plain, strict=True))
    assert sum(output.num_draft_tokens for output in outputs.values()) > len(prompts)
    for positions in (target_positions, *head_positions):
        assert 62 <= max(positions) < 64


def _watched(model: Any, methods: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of all rows that `model` runs from here on."""
    positions: list[int] = []

    def watching(run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(batch: ForwardBatch, *arguments: Any, **options: Any) -> Any:
            positions.extend(batch.positions.tolist())
            return run(batch, *arguments, **options)

        return watched

    for method in methods:
        monkeypatch.setattr(model, method, watching(getattr(model, method)))
    return positions


@pytest.mark.parametrize("num_requests", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_methods_switched_at_random_change_nothing(
    num_requests: int, tiny: CausalLM, tiny_model_dir: Path
) -> None:
    """A soak: five drafters, a method per row and step, shared prefixes, preemptions, greedy and seeded requests."""
    heads = {
        METHOD_OF_HEAD[kind]: tiny_head(kind, tiny, tiny_model_dir)
        for kind in ("eagle-full", "eagle3", "mtp")
    }
    methods = [*heads, SpeculationMethod.NGRAM, SpeculationMethod.DRAFT_MODEL]
    drafted = InProcessEngine(
        tiny,
        draft=tiny.truncated(1),
        ngram=True,
        heads=heads,
        tree=TREE,
        num_pages=60,
        num_draft_tokens=6,
        max_running_requests=6,
        steps_in_flight=2,
        policy=SwitchingPolicy(methods, 1),
    )
    plain = InProcessEngine(tiny, num_pages=256)
    generator = np.random.default_rng(8)
    stems = [generator.integers(3, 290, 12).tolist() for _ in range(4)]
    ids = []
    for number in range(num_requests):
        stem = stems[number % len(stems)]
        prompt = stem[: int(generator.integers(4, 13))] + generator.integers(3, 290, number % 5).tolist()
        sampling = SEEDED if number % 2 else Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0)
        fields = {"max_tokens": int(generator.integers(1, 30)), "sampling": sampling}
        ids.append((drafted.submit(prompt, **fields), plain.submit(prompt, **fields)))  # type: ignore[arg-type]
    drafted_outputs, plain_outputs = drafted.run(), plain.run()
    for drafted_id, plain_id in ids:
        assert drafted_outputs[drafted_id, 0].token_ids == plain_outputs[plain_id, 0].token_ids
    assert sum(output.num_accepted_tokens for output in drafted_outputs.values()) > num_requests / 10
    assert any(output.num_cached_tokens for output in drafted_outputs.values())
    drafted.scheduler.flush_prefix_cache()
    drafted.scheduler.check_integrity()
    assert drafted.scheduler._allocator.ledger.num_free == drafted.limits.num_pages
