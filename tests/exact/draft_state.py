"""What a head has to know of a sequence after a step, and a policy that switches methods in between."""

from __future__ import annotations

import numpy as np
import torch

from gpu_worker.drafting.hidden_state import HiddenStateDrafter
from gpu_worker.models.base import CausalLM
from scheduler_svc.scheduler.speculation_policy import SpeculationDecision, SpeculationFacts
from shared_mem.enums import SpeculationMethod
from tests.exact.drafted_engines import METHOD_OF_HEAD
from tests.harness.engine import InProcessEngine
from tests.harness.whole_sequence import head_whole


def drafter_of(engine: InProcessEngine, kind: str) -> HiddenStateDrafter:
    """The engine's only head drafter."""
    drafter = engine.drafters[METHOD_OF_HEAD[kind]]
    assert isinstance(drafter, HiddenStateDrafter)
    return drafter


def assert_draft_state_is_fresh(engine: InProcessEngine, kind: str, target: CausalLM, slot: int) -> None:
    """KV and carried outputs equal those of a cold pass over the same tokens with the target's own hidden states."""
    drafter = drafter_of(engine, kind)
    head, pool = drafter._head, engine.head_pools[METHOD_OF_HEAD[kind]]
    computed = int(drafter._computed[slot])
    tokens = engine.table.known(slot)[:computed].tolist()
    rows, fresh = head_whole(head, target, tokens)
    first = 0 if head.config.attends_first_slot else 1
    slots = torch.from_numpy(engine.table.kv_slots(slot, np.arange(first, computed)))
    for layer in range(head.config.num_layers):
        for ours, theirs in ((pool.keys, fresh.keys), (pool.values, fresh.values)):  # type: ignore[attr-defined]
            torch.testing.assert_close(
                ours[layer][slots], theirs[layer][first:computed], atol=1e-4, rtol=1e-4
            )
    if drafter._ready[slot]:
        torch.testing.assert_close(drafter._normed[slot], rows.normed[-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(drafter._recycled[slot], rows.recycled[-1], atol=1e-4, rtol=1e-4)


class SwitchingPolicy:
    """Every row drafts by another method: any of those loaded, or none, as a fixed random sequence says."""

    def __init__(self, methods: list[SpeculationMethod], seed: int, most_drafts: int = 6) -> None:
        self._methods = methods
        self._most_drafts = most_drafts
        self._random = np.random.default_rng(seed)

    def followers(self, method: SpeculationMethod) -> frozenset[SpeculationMethod]:
        """All of them follow every sequence."""
        return frozenset(self._methods)

    def decide(self, facts: SpeculationFacts) -> SpeculationDecision:
        """A random method with a random number of drafts, within what fits."""
        choice = int(self._random.integers(0, len(self._methods) + 1))
        if choice == len(self._methods):
            return SpeculationDecision(SpeculationMethod.DISABLED, 0)
        if not facts.decoding:
            return SpeculationDecision(self._methods[choice], 0)
        covered = facts.num_coverable_tokens - facts.num_tokens - facts.num_unsure_tokens - 1
        wished = int(self._random.integers(0, self._most_drafts + 1))
        most = min(facts.num_remaining_tokens - 1, facts.num_budget_rows, covered)
        return SpeculationDecision(self._methods[choice], max(0, min(most, wished)))
