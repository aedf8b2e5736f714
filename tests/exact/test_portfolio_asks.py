"""A portfolio that asks now these parts and now those, by times and successes that vary, gives what off gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gpu_worker.draft_tree import DraftTree
from gpu_worker.drafting.base import Drafter, DraftRequest
from gpu_worker.drafting.tree_growth import CHAINS, TreeShape
from gpu_worker.models.base import CausalLM
from scheduler_svc.messages import Sampling
from shared_mem.enums import AcceptanceRule, SpeculationMethod
from tests.exact.test_lossless_tiny import assert_equal
from tests.harness.engine import GREEDY, InProcessEngine
from tests.harness.tiny_heads import tiny_head

PARTS = (SpeculationMethod.NGRAM, SpeculationMethod.EAGLE3, SpeculationMethod.MTP)


class Clock:
    """Every call takes a time of its own."""

    def __init__(self) -> None:
        self._times = np.random.default_rng(5)
        self._now = 0.0

    def __call__(self) -> float:
        self._now += float(self._times.exponential())
        return self._now


def _noted(drafter: Drafter, rounds: list[set[int]]) -> None:
    """Notes the slots of each call, whose drafts are made as before."""
    propose = drafter.propose

    def noted(requests: Sequence[DraftRequest]) -> DraftTree:
        rounds.append({request.slot for request in requests})
        return propose(requests)

    drafter.propose = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("shape", [CHAINS, TreeShape(max_depth=3, max_children=4)], ids=["chain", "tree"])
def test_what_is_not_asked_in_every_step_stays_exact(
    shape: TreeShape, tiny: CausalLM, tiny_model_dir: Path, prompts: list[list[int]]
) -> None:
    """Parts that were left out for some steps are asked again: their draft KV has to have followed all the same."""
    heads = {
        SpeculationMethod.EAGLE3: tiny_head("eagle3", tiny, tiny_model_dir),
        SpeculationMethod.MTP: tiny_head("mtp", tiny, tiny_model_dir),
    }
    drafted = InProcessEngine(
        tiny,
        ngram=True,
        heads=heads,
        tree=shape,
        num_draft_tokens=4 if shape.is_chain else 9,
        portfolio=True,
        portfolio_options={"probe_interval": 4, "clock": Clock(), "least_probability": 0.02},
    )
    plain = InProcessEngine(tiny)
    asked: dict[SpeculationMethod, list[set[int]]] = {method: [] for method in PARTS}
    rounds: list[set[int]] = []
    for method, calls in asked.items():
        _noted(drafted.drafters[method], calls)
    _noted(drafted.drafters[SpeculationMethod.PORTFOLIO], rounds)
    ids = []
    for seed, prompt in enumerate(prompts):
        for sampling in (GREEDY, Sampling(1.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, seed)):
            fields = {"sampling": sampling, "max_tokens": 40, "num_logprobs": 1}
            ids.append((drafted.submit(prompt, **fields), plain.submit(prompt, **fields)))  # type: ignore[arg-type]
    drafted_outputs, plain_outputs = drafted.run(), plain.run()
    for drafted_id, plain_id in ids:
        assert_equal(drafted_outputs[drafted_id, 0], plain_outputs[plain_id, 0])
    wanted = sum(map(len, rounds))
    for calls in asked.values():  # every part was asked in some rounds, and left out in others
        assert wanted / 10 < sum(map(len, calls)) < wanted * 9 / 10


@pytest.mark.parametrize("rule", [AcceptanceRule.REJECTION, AcceptanceRule.BLOCK])
def test_where_drafts_are_drawn_one_part_is_asked_but_for_probes(
    rule: AcceptanceRule, tiny: CausalLM, tiny_model_dir: Path, prompts: list[list[int]]
) -> None:
    engine = InProcessEngine(
        tiny,
        ngram=True,
        heads={SpeculationMethod.EAGLE3: tiny_head("eagle3", tiny, tiny_model_dir)},
        portfolio=True,
        portfolio_options={"probe_interval": 4, "clock": Clock()},
    )
    asked: list[set[int]] = []
    rounds: list[set[int]] = []
    for method in PARTS[:2]:
        _noted(engine.drafters[method], asked)
    _noted(engine.drafters[SpeculationMethod.PORTFOLIO], rounds)
    one = engine.submit(
        prompts[0], sampling=Sampling(1.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 3), rule=rule, max_tokens=60
    )
    assert engine.run()[one, 0].finished is not None
    num_probes = 4 + (len(rounds) - 4) // 4
    assert len(asked) == len(rounds) + num_probes
