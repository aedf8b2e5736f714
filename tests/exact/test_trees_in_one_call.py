"""A tree that one call of the kernels grows is, node by node and bit by bit, the tree grown level by level."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gpu_worker.draft_tree import DraftTree
from gpu_worker.drafting.base import DraftRequest
from gpu_worker.drafting.hidden_state import HiddenStateDrafter
from gpu_worker.drafting.tree_growth import TreeShape
from gpu_worker.models.base import CausalLM
from tests.exact.drafted_engines import METHOD_OF_HEAD
from tests.harness.engine import InProcessEngine
from tests.harness.tiny_heads import tiny_head

KINDS = ("eagle-full", "eagle3", "eagle3-normed", "mtp")


def _compared(drafter: HiddenStateDrafter, seen: list[int]) -> None:
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
        assert by_level.confidences is not None
        assert at_once.confidences.tolist() == by_level.confidences.tolist()
        seen.append(at_once.num_nodes - at_once.num_requests)
        return at_once

    drafter.propose = both  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("shape", "budget"),
    [
        (TreeShape(max_depth=3, max_children=4), 9),
        (TreeShape(max_depth=5), 15),
        (TreeShape(max_depth=6, max_children=2), 3),
        (TreeShape(max_depth=1), 5),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_give_the_same_tree(
    kind: str,
    shape: TreeShape,
    budget: int,
    native_model: CausalLM,
    native_dir: Path,
    prompts: list[list[int]],
) -> None:
    """Batches that grow and shrink, budgets that the end of the context cuts."""
    head = tiny_head(kind, native_model, native_dir)
    method = METHOD_OF_HEAD[kind]
    engine = InProcessEngine(
        native_model,
        heads={method: head},
        tree=shape,
        num_draft_tokens=budget,
        max_context_tokens=72,
        page_size=16,
    )
    seen: list[int] = []
    drafter = engine.drafters[method]
    assert isinstance(drafter, HiddenStateDrafter)
    _compared(drafter, seen)
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, max_tokens=min(72 - len(prompt), 14 + 6 * i))
    engine.run()
    assert max(seen) > budget
    assert len(seen) > 12
