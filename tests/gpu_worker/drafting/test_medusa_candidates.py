"""Medusa's nodes: the best of all paths, without what is truncated away or worth too little."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.config import WorkerConfig
from gpu_worker.draft_tree import DraftTree
from gpu_worker.drafters import DraftWeights, build_drafters
from gpu_worker.drafting.base import DraftRequest
from gpu_worker.drafting.medusa import MedusaDrafter, _best_nodes
from gpu_worker.drafting.tree_shape import build_product_tree, with_best_chain
from gpu_worker.layers.linear import Linear
from gpu_worker.layers.output_head import TorchOutputHead
from gpu_worker.models.heads.config import HeadConfig, HeadKind
from gpu_worker.request_state import RequestTable
from gpu_worker.sampling.sampler import Sampler
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission, SamplingRecord

HitRates = tuple[tuple[float, ...], ...]

# With these rates 64 nodes end before the third depth.
_RARE: HitRates = ((0.12,) * 8, (0.12,) * 8, (0.01,) + (0.0,) * 7)
_VOCABULARY, _HIDDEN, _HEADS, _BUDGET = 100, 8, 3, 20


def _proposed(*, shared: bool, tree: bool = True, **sampling: Any) -> tuple[list[int], list[int], list[int]]:
    """(tokens, parents, depths) of what three heads, the same output behind each, propose with `sampling`."""
    proposed, _ = _proposal(shared=shared, tree=tree, **sampling)
    return proposed.tokens.tolist(), proposed.parents.tolist(), proposed.depths.tolist()


def _heads(*, shared: bool, vocabulary: int = _VOCABULARY, rates: HitRates = ()) -> tuple[Any, torch.Tensor]:
    """Three heads of different minds, and the output rows behind each."""
    weights = torch.randn(vocabulary, _HIDDEN) * 3
    outputs = [TorchOutputHead(Linear(weights)) for _ in range(1 if shared else _HEADS)]
    scales = torch.tensor([1.0, 0.7, -0.4])[None, :, None]
    heads = SimpleNamespace(
        config=HeadConfig(
            HeadKind.MEDUSA, _HIDDEN, vocabulary, vocabulary, num_medusa_heads=_HEADS, hit_rates=rates
        ),
        outputs=outputs * _HEADS if shared else outputs,
        token_ids=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        candidates=lambda *_: None,
        forward=lambda normed, num_heads: normed[:, None] * scales[:, :num_heads],
    )
    return heads, weights


def _proposal(
    *,
    shared: bool,
    tree: bool,
    budget: int = _BUDGET,
    least: float = 0.0,
    vocabulary: int = _VOCABULARY,
    rates: HitRates = (),
    **sampling: Any,
) -> tuple[DraftTree, torch.Tensor]:
    """What is proposed, and the log-probabilities [heads, V] of the heads behind it; as the worker builds it."""
    torch.manual_seed(0)
    heads, weights = _heads(shared=shared, vocabulary=vocabulary, rates=rates)
    table = RequestTable(2, 64, 16, torch.device("cpu"))
    sampler = Sampler(2, vocabulary, "cpu")
    method = SpeculationMethod.MEDUSA
    config = WorkerConfig(
        speculation=(method,),
        draft_shape="tree" if tree else "chain",
        max_draft_depth=_HEADS,
        min_draft_probability=least,
    )
    target: Any = None  # which Medusa's heads have been built for
    drafters, _ = build_drafters(config, DraftWeights(medusa=heads), target, sampler, table, 1)
    drafter = drafters[method]
    assert isinstance(drafter, MedusaDrafter)
    record = SamplingRecord(seed=3, **sampling)
    admission = Admission(0, 1, np.array([1, 2, 3], dtype=np.int32), 3, 0, 0, record, 0)
    table.admit(admission)
    sampler.admit(0, record, admission.token_ids, 3)
    drafter.admit(admission)
    drafter._hidden[0], drafter._ready[0] = torch.randn(_HIDDEN) / 3, True
    proposed = drafter.propose([DraftRequest(0, budget)])
    states = heads.forward(drafter._hidden[:1], len(heads.outputs))
    return proposed, torch.log_softmax(states[0] @ weights.T, dim=-1)


@pytest.mark.parametrize("shared", [True, False])
def test_a_law_of_one_token_leaves_a_chain(shared: bool) -> None:
    tokens, parents, depths = _proposed(shared=shared, temperature=1.0, top_k=1)
    assert depths == [0, 1, 2, 3]
    assert parents == [0, 0, 1, 2]
    assert 0 not in tokens[1:]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 0.8, "min_p": 0.3},
        {"temperature": 1.0, "top_k": 2},
        {"presence_penalty": 1.0},
    ],
)
@pytest.mark.parametrize("tree", [True, False])
def test_one_pass_over_shared_rows_gives_what_a_pass_for_each_head_does(
    sampling: dict[str, Any], tree: bool
) -> None:
    together = _proposed(shared=True, tree=tree, **sampling)
    assert together == _proposed(shared=False, tree=tree, **sampling)
    tokens, parents, depths = together
    assert len(tokens) > 1
    assert all(
        parent < node and depths[parent] == depths[node] - 1 for node, parent in enumerate(parents) if node
    )


def _paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """Tokens from behind the root down to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in list(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True))[1:]:
        paths.append((*paths[parent], token))
    return set(paths[1:])


@pytest.mark.parametrize("budget", [1, 3, 6])
@pytest.mark.parametrize("least", [0.0, 0.05, 0.2, 0.9])
def test_a_step_verifies_the_paths_that_its_heads_are_surest_of(budget: int, least: float) -> None:
    least_value = math.log(least) if least else -math.inf
    tree, log_probs = _proposal(shared=True, tree=True, budget=budget, least=least)
    worth: dict[tuple[int, ...], float] = {}
    best = log_probs.topk(4).indices.tolist()
    for depth in range(1, _HEADS + 1):
        for path in product(*best[:depth]):
            worth[path] = math.fsum(float(log_probs[k, token]) for k, token in enumerate(path))
    ordered = sorted((path for path in worth if worth[path] >= least_value), key=lambda path: -worth[path])
    assert _paths(tree) == set(ordered[:budget])
    sure = tree.confidences
    assert sure is not None
    for node, parent in list(enumerate(tree.parents.tolist()))[1:]:
        depth = int(tree.depths[parent])
        assert sure[node] == pytest.approx(
            math.exp(float(log_probs[depth, int(tree.tokens[node])])), rel=1e-4
        )


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}])
def test_a_vocabulary_of_fewer_ids_than_a_depth_has_candidates(sampling: dict[str, Any]) -> None:
    tree, log_probs = _proposal(shared=True, tree=True, vocabulary=5, **sampling)
    assert len(tree.tokens) > 5
    assert int(tree.tokens[1:].max()) < log_probs.shape[1]


def test_however_rarely_the_last_head_hits_it_may_be_sure() -> None:
    base = build_product_tree(_RARE, 64)
    assert max(base.depths) == 2
    shape = with_best_chain(build_product_tree(_RARE, 64 - 3), _RARE)
    sure: list[list[tuple[int, float]]] = [
        [(10 * d + r, -0.01 - 5.0 * r) for r in range(8)] for d in range(3)
    ]
    nodes = _best_nodes(shape, sure, budget=4, least_value=math.log(0.2))
    assert (nodes.tokens, nodes.parents) == ([0, 10, 20], [-1, 0, 1])


def test_a_head_that_rarely_hits_is_drafted_behind_the_best_of_the_others() -> None:
    tree, log_probs = _proposal(shared=True, tree=True, budget=64, rates=_RARE)
    chain = tuple(log_probs.argmax(dim=-1).tolist())
    assert [path for path in _paths(tree) if len(path) == _HEADS] == [chain]
