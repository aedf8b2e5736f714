"""A portfolio's drafts, chosen by what it has learnt, leave the target's law as it is: chi-square under each rule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpu_worker.draft_tree import DraftTree, tree_of
from gpu_worker.drafting.base import DraftRequest, TargetHidden, TargetProgress
from gpu_worker.drafting.portfolio import PortfolioDrafter
from gpu_worker.request_state import RequestTable
from gpu_worker.sampling.sampler import Sampler
from shared_mem.enums import AcceptanceRule, SpeculationMethod
from shared_mem.records import Admission

from . import simulation as sim

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NUM_SEQUENCES, NUM_TOKENS = 3000, 6
HIDDEN = TargetHidden(torch.zeros(0, 1), None, ())


class TablePart:
    """A drafter of the simulation as a part of a portfolio."""

    keeps_state = False
    hidden_layers = None

    def __init__(
        self, method: SpeculationMethod, drafter: sim.Drafter, sampler: Sampler, table: RequestTable
    ) -> None:
        self.method = method
        self._drafter, self._sampler, self._table = drafter, sampler, table

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTree:
        slots = [request.slot for request in requests]
        lengths = self._table.num_tokens[slots].tolist()
        roots = self._table.last_tokens(slots)
        tree = self._drafter(self._sampler, slots, roots, lengths)
        size = int(tree.indptr[1]) - 1
        budgets = [min(request.num_draft_tokens, size) for request in requests]
        tokens = tree.tokens.view(-1, size + 1)[:, 1:].tolist()
        parents = (tree.parents.view(-1, size + 1)[0, 1:] - 1).tolist()
        cut = tree_of(
            roots,
            [row[:budget] for row, budget in zip(tokens, budgets, strict=True)],
            [parents[:budget] for budget in budgets],
        )
        if tree.q is None:
            return cut
        laws = tree.q.view(len(slots), size + 1, -1)[:, 1:]
        return cut.with_laws([list(row[:budget]) for row, budget in zip(laws, budgets, strict=True)])

    def admit(self, admission: Admission) -> None: ...
    def release(self, slot: int) -> None: ...
    def prefill(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None: ...
    def catch_up(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None: ...
    def num_computed_after(self, progress: TargetProgress) -> int:
        return 0


def simulate(rule: AcceptanceRule, probe_interval: int) -> tuple[np.ndarray, PortfolioDrafter, set[bool]]:
    """[M, NUM_TOKENS] the sequences that the portfolio helped to write, and whether drafts of a round were drawn."""
    ticks = itertools.count()
    table = RequestTable(NUM_SEQUENCES, 64, 16, torch.device("cpu"))
    sampler = Sampler(NUM_SEQUENCES, sim.VOCABULARY, "cpu")
    drafters = {
        SpeculationMethod.NGRAM: sim.lookup_chain,
        SpeculationMethod.EAGLE: sim.best_children_tree,
        SpeculationMethod.DRAFT_MODEL: sim.model_chain(sim.DRAFT, 2),
    }
    parts = {method: TablePart(method, of, sampler, table) for method, of in drafters.items()}
    portfolio = PortfolioDrafter(
        parts, table, probe_interval=probe_interval, clock=lambda: float(next(ticks))
    )
    for slot in range(NUM_SEQUENCES):
        record = replace(sim.FILTERED, seed=slot, acceptance_rule=rule)
        admission = Admission(slot, 0, np.array([0], dtype=np.int32), 1, 0, 0, record)
        table.admit(admission)
        sampler.admit(slot, record, [0], 1)
        portfolio.admit(admission)
    slots = np.arange(NUM_SEQUENCES)
    drawn: set[bool] = set()
    while int(table.num_tokens.min()) <= NUM_TOKENS:
        tree = portfolio.propose([DraftRequest(slot, 6) for slot in slots.tolist()])
        drawn.add(tree.q is not None)
        lengths = table.num_tokens[slots]
        result = sampler.verify(tree, sim.TARGET[tree.tokens], slots.tolist(), lengths)
        table.append_each(slots, result.token_ids)
        portfolio.catch_up(
            [
                TargetProgress(slot, int(table.num_tokens[slot]), accepted, 0, np.arange(0))
                for slot, accepted in enumerate(result.num_accepted)
            ],
            HIDDEN,
        )
    return table.tokens[:, 1 : NUM_TOKENS + 1], portfolio, drawn


@pytest.mark.parametrize("probe_interval", [32, 2])
@pytest.mark.parametrize("rule", [AcceptanceRule.COUPLED, AcceptanceRule.REJECTION, AcceptanceRule.BLOCK])
def test_the_law_is_the_targets(rule: AcceptanceRule, probe_interval: int) -> None:
    """With an interval of 32 all parts are asked in every round, with 2 some only in every second one."""
    tokens, portfolio, drawn = simulate(rule, probe_interval)
    laws = sim.filtered_law(sim.TARGET)
    sim.assert_joint_law(tokens[:, :3], laws)
    sim.assert_joint_law(tokens, laws)
    assert all(count > 0 for count in portfolio.num_accepted.values())
    assert drawn == ({False} if rule is AcceptanceRule.COUPLED else {True})
