"""The draft model's own state: its KV after prefix hits, rejections, holes, and at the end of its context."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.drafting.tree_growth import CHAINS, TreeShape
from gpu_worker.models.base import CausalLM
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from scheduler_svc.messages import Sampling
from shared_mem.enums import AcceptanceRule, SpeculationMethod
from tests.harness.engine import InProcessEngine
from tests.harness.scripted_drafters import ScriptedDrafter, oracle
from tests.harness.whole_sequence import forward_whole
from tests.models import make_tiny_llama

References = dict[tuple[int, ...], list[int]]


def _fresh_draft_keys(model: CausalLM, tokens: list[int]) -> list[torch.Tensor]:
    """Per layer [n, Hkv, D]: keys of a cold prefill of `tokens`."""
    _, pool = forward_whole(model, tokens, attention=ReferenceAttention())
    return [pool.keys[layer][: len(tokens)] for layer in range(model.num_layers)]


def _assert_draft_kv_is_fresh(engine: InProcessEngine, draft: CausalLM, slot: int) -> None:
    """What the drafter holds for a slot equals a cold prefill of the same tokens, up to its high-water mark."""
    drafter = engine.drafters[SpeculationMethod.DRAFT_MODEL]
    computed = int(drafter._computed[slot])  # type: ignore[attr-defined]
    tokens = engine.table.known(slot)[:computed].tolist()
    assert computed > 0
    assert engine.draft_pool is not None
    slots = torch.from_numpy(engine.table.kv_slots(slot, np.arange(computed)))
    for layer, fresh in enumerate(_fresh_draft_keys(draft, tokens)):
        torch.testing.assert_close(engine.draft_pool.keys[layer][slots], fresh, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tree", [CHAINS, TreeShape(max_depth=3, max_children=3)])
@pytest.mark.parametrize("rule", [AcceptanceRule.COUPLED, AcceptanceRule.REJECTION, AcceptanceRule.BLOCK])
def test_draft_kv_equals_a_cold_prefill_after_every_step(
    rule: AcceptanceRule, tree: TreeShape, tiny: CausalLM, prompts: list[list[int]]
) -> None:
    """Accepted runs of every length, at temperature 0.8: nothing provisional survives."""
    draft = tiny.truncated(1)
    engine = InProcessEngine(tiny, draft=draft, tree=tree, num_draft_tokens=4 if tree.is_chain else 8)
    sampling = Sampling(0.8, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 4)
    request = engine.submit(prompts[5], max_tokens=32, sampling=sampling, rule=rule)
    slots_seen = 0
    while engine.step():
        for slot in np.flatnonzero(engine.table.epochs >= 0).tolist():
            _assert_draft_kv_is_fresh(engine, draft, slot)
            slots_seen += 1
    output = engine.outputs[request, 0]
    assert slots_seen > 5
    assert 0 < output.num_accepted_tokens < output.num_draft_tokens


def test_draft_kv_is_exact_where_another_methods_drafts_were_accepted(
    tiny: CausalLM, prompts: list[list[int]], references: References
) -> None:
    """In a portfolio both draft in one step: what the draft model wrote for its own wrong tokens must go."""
    draft = tiny.truncated(1)
    right = {SpeculationMethod.NGRAM: lambda table: ScriptedDrafter(table, oracle(references))}
    engine = InProcessEngine(tiny, draft=draft, scripted=right, portfolio=True, num_draft_tokens=8)
    request = engine.submit(prompts[5], max_tokens=32)
    while engine.step():
        for slot in np.flatnonzero(engine.table.epochs >= 0).tolist():
            _assert_draft_kv_is_fresh(engine, draft, slot)
    assert engine.outputs[request, 0].num_accepted_tokens > 20
    by_part = engine.drafters[SpeculationMethod.PORTFOLIO].num_accepted  # type: ignore[attr-defined]
    assert by_part[SpeculationMethod.NGRAM] > by_part[SpeculationMethod.DRAFT_MODEL]


def test_a_prefix_hit_resumes_the_draft_exactly(tiny: CausalLM) -> None:
    """Two prompts share exactly two full pages; the second's drafts and acceptance are those of a cold run."""
    draft = tiny.truncated(1)
    generator = np.random.default_rng(5)
    shared = generator.integers(3, 290, 8).tolist()
    first = shared + generator.integers(3, 290, 6).tolist()
    second = shared + generator.integers(3, 290, 7).tolist()
    cold = InProcessEngine(tiny, draft=draft)
    cold_id = cold.submit(second, max_tokens=24)
    cold_output = cold.run()[cold_id, 0]
    warm = InProcessEngine(tiny, draft=draft)
    warm.generate([first], max_tokens=8)
    warm_id = warm.submit(second, max_tokens=24)
    warm.step()
    slot = int(np.flatnonzero(warm.table.epochs >= 0)[0])
    drafter = warm.drafters[SpeculationMethod.DRAFT_MODEL]
    assert int(drafter._computed[slot]) == len(second) + 1  # type: ignore[attr-defined]
    _assert_draft_kv_is_fresh(warm, draft, slot)
    warm_output = warm.run()[warm_id, 0]
    assert warm_output.num_cached_tokens == 8
    assert warm_output.token_ids == cold_output.token_ids
    assert warm_output.steps == cold_output.steps


@pytest.mark.parametrize("first_method", [SpeculationMethod.DISABLED, SpeculationMethod.NGRAM])
def test_pages_without_draft_kv_are_filled_before_drafting(
    first_method: SpeculationMethod, tiny: CausalLM, prompts: list[list[int]]
) -> None:
    """A prefix computed with speculation off (or another method) carries no draft KV: the drafter computes it."""
    draft = tiny.truncated(1)
    cold = InProcessEngine(tiny, draft=draft)
    cold_id = cold.submit(prompts[5], max_tokens=24)
    cold_output = cold.run()[cold_id, 0]
    engine = InProcessEngine(tiny, draft=draft, ngram=True)
    engine.generate([prompts[5]], max_tokens=8, method=first_method)
    request = engine.submit(prompts[5], max_tokens=24, method=SpeculationMethod.DRAFT_MODEL)
    output = engine.run()[request, 0]
    assert output.num_cached_tokens > 0
    assert output.steps == cold_output.steps


def test_past_the_draft_models_context_decoding_goes_on_plainly(tmp_path: Path, tiny: CausalLM) -> None:
    """A draft of 32 positions beside a target of 64: no position ever reaches the limit of its model."""
    directory = make_tiny_llama(tmp_path / "draft", num_layers=1, max_position_embeddings=32)
    draft = load_model(resolve_model(str(directory)), "float32", torch.device("cpu"))
    positions: list[int] = []
    forward = draft.forward

    def watching(batch, pool, attention):  # type: ignore[no-untyped-def]
        positions.extend(batch.positions.tolist())
        return forward(batch, pool, attention)

    draft.forward = watching  # type: ignore[method-assign]
    prompt = np.random.default_rng(1).integers(3, 290, 20).tolist()
    plain = InProcessEngine(tiny, max_context_tokens=64).generate([prompt], max_tokens=100)[0]
    engine = InProcessEngine(tiny, draft=draft, max_context_tokens=64)
    request = engine.submit(prompt, max_tokens=100)
    output = engine.run()[request, 0]
    assert output.token_ids == plain
    assert max(positions) <= 31
    drafted_until = 20 + sum(1 + accepted for drafts, accepted in output.steps if drafts)
    assert 28 <= drafted_until <= 36


@pytest.mark.parametrize("rule", [AcceptanceRule.REJECTION, AcceptanceRule.BLOCK])
def test_a_sampled_draft_equal_to_the_target_is_accepted_in_full(
    rule: AcceptanceRule, tiny: CausalLM, prompts: list[list[int]]
) -> None:
    """q = p: the ratio is one at every position."""
    engine = InProcessEngine(tiny, draft=tiny.truncated(tiny.num_layers))
    sampling = Sampling(0.9, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 77)
    ids = [engine.submit(p, max_tokens=31, sampling=sampling, rule=rule) for p in prompts]
    outputs = engine.run()
    for request_id in ids:
        output = outputs[request_id, 0]
        # a float32 rounding difference between the two passes may cost a draft in a thousand
        assert output.num_accepted_tokens >= output.num_draft_tokens - 1
