"""What one call of the kernels drafts is, node by node and bit by bit, what is drafted level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from gpu_worker.draft_tree import DraftTree
from gpu_worker.drafting.base import DraftRequest
from gpu_worker.drafting.draft_model import DraftModelDrafter
from gpu_worker.drafting.hidden_state import HiddenStateDrafter
from gpu_worker.drafting.medusa import MedusaDrafter
from gpu_worker.drafting.tree_growth import CHAINS, TreeShape
from gpu_worker.models.base import CausalLM
from shared_mem.enums import SpeculationMethod
from tests.exact.drafted_engines import METHOD_OF_HEAD
from tests.harness.engine import GREEDY, InProcessEngine
from tests.harness.tiny_heads import tiny_head, tiny_medusa

KINDS = ("eagle-full", "eagle3", "eagle3-normed", "mtp", "draft-model", "draft-model-of-some-ids")


def _compared(
    drafter: HiddenStateDrafter | DraftModelDrafter, seen: list[int], allowed: list[int], rtol: float
) -> None:
    """Makes the drafter propose in both ways."""
    propose, one_call = drafter.propose, drafter._one_call
    assert one_call is not None

    def both(requests: Sequence[DraftRequest]) -> DraftTree:
        at_once = propose(requests)
        drafter._one_call = None
        by_level = propose(requests)
        drafter._one_call = one_call
        assert at_once.host == by_level.host
        assert at_once.confidences is not None
        if by_level.confidences is not None:  # not of chains
            np.testing.assert_allclose(at_once.confidences, by_level.confidences, rtol=rtol)
        seen.append(at_once.num_nodes - at_once.num_requests)
        allowed.append(sum(request.num_draft_tokens for request in requests))
        return at_once

    drafter.propose = both  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("shape", "budget"),
    [
        (TreeShape(max_depth=3, max_children=4), 9),
        (TreeShape(max_depth=5), 15),
        (TreeShape(max_depth=6, max_children=2), 3),
        (TreeShape(max_depth=1), 5),
        (CHAINS, 4),
        (CHAINS, 7),
        (replace(CHAINS, least_value=-5.0), 7),
        (TreeShape(max_depth=5, least_value=-0.7), 15),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_give_the_same_drafts(
    kind: str,
    temperature: float,
    shape: TreeShape,
    budget: int,
    native_model: CausalLM,
    native_dir: Path,
    prompts: list[list[int]],
) -> None:
    """Batches that grow and shrink, budgets that the end of the context cuts."""
    method = METHOD_OF_HEAD.get(kind, SpeculationMethod.DRAFT_MODEL)
    parts: dict[str, Any]
    if method is SpeculationMethod.DRAFT_MODEL:
        parts = {"draft": native_model.truncated(1)}
        if kind != "draft-model":
            parts["draft_ids"] = torch.arange(0, native_model.config.vocab_size, 2)
    else:
        parts = {"heads": {method: tiny_head(kind, native_model, native_dir)}}
    engine = InProcessEngine(
        native_model,
        **parts,
        tree=shape,
        num_draft_tokens=budget,
        max_context_tokens=72,
        page_size=16,
    )
    seen: list[int] = []
    allowed: list[int] = []
    drafter = engine.drafters[method]
    assert isinstance(drafter, HiddenStateDrafter | DraftModelDrafter)
    _compared(drafter, seen, allowed, rtol=0.0 if temperature == 0 else 1e-4)
    for i, prompt in enumerate(prompts):
        sampled = msgspec.structs.replace(GREEDY, temperature=temperature if i % 3 else 0.0, seed=i)
        engine.submit(prompt, max_tokens=min(72 - len(prompt), 14 + 6 * i), sampling=sampled)
    engine.run()
    if shape.prunes:
        assert sum(seen) < 0.9 * sum(allowed)
    else:
        assert max(seen) > budget
    assert len(seen) > 12


@pytest.mark.parametrize("shape", [CHAINS, TreeShape(max_depth=3)], ids=["chain", "tree"])
def test_medusa_drafts_the_same_in_one_call(
    shape: TreeShape, native_model: CausalLM, prompts: list[list[int]]
) -> None:
    """A few requests at once, of different lengths."""
    engine = InProcessEngine(native_model, medusa=tiny_medusa(native_model), tree=shape, num_draft_tokens=5)
    drafter = engine.drafters[SpeculationMethod.MEDUSA]
    assert isinstance(drafter, MedusaDrafter)
    heads, propose, seen = drafter._heads, drafter.propose, []

    def both(requests: Sequence[DraftRequest]) -> DraftTree:
        at_once = propose(requests)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heads, "candidates", lambda *_: None)
            in_steps = propose(requests)
        assert at_once.host == in_steps.host
        assert at_once.confidences is not None
        assert in_steps.confidences is not None
        assert at_once.confidences.tolist() == in_steps.confidences.tolist()
        assert heads.candidates(drafter._hidden[:1], 1, 2) is not None
        seen.append(at_once.num_nodes - at_once.num_requests)
        return at_once

    drafter.propose = both  # type: ignore[method-assign]
    for prompt in prompts[:3]:
        engine.submit(prompt, max_tokens=12, sampling=GREEDY)
    engine.run()
    assert max(seen) >= 9


def test_medusa_has_no_more_candidates_than_draft_ids(native_model: CausalLM) -> None:
    heads = tiny_medusa(native_model, num_draft_ids=5)
    hidden = torch.randn(3, native_model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    found = heads.candidates(hidden, 2, 8)
    assert found is not None
    ids, values = (np.array(of) for of in found)
    assert ids.shape == values.shape == (3, 2, 5)
    assert heads.token_ids is not None
    assert (np.sort(ids, axis=-1) == heads.token_ids.numpy()).all()
    np.testing.assert_allclose(np.exp(values).sum(axis=-1), 1.0, rtol=1e-4)
