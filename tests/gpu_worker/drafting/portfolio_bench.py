"""A portfolio of two scripted parts over a table of two sequences, with a clock that a test moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from gpu_worker.draft_tree import DraftTree, tree_of
from gpu_worker.drafting.base import DraftRequest, TargetHidden, TargetProgress
from gpu_worker.drafting.portfolio import PortfolioDrafter
from gpu_worker.request_state import RequestTable
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission, SamplingRecord

A, B = SpeculationMethod.NGRAM, SpeculationMethod.EAGLE3
HIDDEN = TargetHidden(torch.zeros(0, 1), None, ())
VOCAB = 50

Nodes = tuple[list[int], list[int]]  # tokens and parents behind the root


def chain(*tokens: int) -> Nodes:
    return list(tokens), list(range(-1, len(tokens) - 1))


class Clock:
    """Goes on as a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Part:
    """Proposes what a test says, cut to the budget, and notes what it was asked for."""

    keeps_state = False
    hidden_layers = None

    def __init__(
        self,
        method: SpeculationMethod,
        table: RequestTable,
        nodes: Callable[[int], Nodes],
        law: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self.method = method
        self.budgets: list[int] = []
        self.seconds = 0.0  # what it takes to draft
        self._clock = clock or Clock()
        self._table = table
        self._nodes = nodes
        self._law = law

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTree:
        self.budgets += [request.num_draft_tokens for request in requests]
        self._clock.now += self.seconds
        of = [self._nodes(int(self._table.num_tokens[request.slot])) for request in requests]
        tokens = [nodes[: r.num_draft_tokens] for (nodes, _), r in zip(of, requests, strict=True)]
        parents = [above[: r.num_draft_tokens] for (_, above), r in zip(of, requests, strict=True)]
        roots = [int(self._table.known(request.slot)[-1]) for request in requests]
        tree = tree_of(roots, tokens, parents)
        if not self._law:
            return tree
        return tree.with_laws([[torch.full((VOCAB,), self._law) for _ in drafts] for drafts in tokens])

    def admit(self, admission: Admission) -> None: ...
    def release(self, slot: int) -> None: ...
    def prefill(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None: ...
    def catch_up(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None: ...
    def num_computed_after(self, progress: TargetProgress) -> int:
        return 0


class Bench:
    """A table of two slots and a portfolio; `step` lets the target emit given tokens."""

    def __init__(self, a: Callable[[int], Nodes], b: Callable[[int], Nodes], **options: float) -> None:
        self.table = RequestTable(2, 2000, 16, torch.device("cpu"))
        laws = {name: options.pop(name, 0.0) for name in ("law_a", "law_b")}
        self.clock = Clock()
        self.parts = {
            A: Part(A, self.table, a, laws["law_a"], self.clock),
            B: Part(B, self.table, b, laws["law_b"], self.clock),
        }
        self.rest = 0.0  # seconds of a step beside its drafting
        self.drafter = PortfolioDrafter(self.parts, self.table, clock=self.clock, **options)  # type: ignore[arg-type]
        for slot in (0, 1):
            self.admit(slot)

    def admit(self, slot: int) -> None:
        admission = Admission(slot, 1, np.array([1, 2], dtype=np.int32), 2, 0, 0, SamplingRecord())
        self.table.admit(admission)
        self.drafter.admit(admission)

    def paths(self, tree: DraftTree, request: int = 0) -> list[tuple[int, ...]]:
        """Tokens down to each node behind the root, in the tree's order."""
        start, stop = int(tree.indptr[request]), int(tree.indptr[request + 1])
        path: dict[int, tuple[int, ...]] = {start: ()}
        for node in range(start + 1, stop):
            path[node] = (*path[int(tree.parents[node])], int(tree.tokens[node]))
        return [path[node] for node in range(start + 1, stop)]

    def step(self, emitted: list[int], slot: int = 0, budget: int = 8) -> DraftTree:
        """One round whose result is `emitted`; accepted are those on a path of the tree."""
        tree = self.drafter.propose([DraftRequest(slot, budget)])
        accepted = 0
        while accepted < len(emitted) - 1 and tuple(emitted[: accepted + 1]) in self.paths(tree):
            accepted += 1
        emitted = emitted[: accepted + 1]
        first = int(self.table.num_tokens[slot]) - 1
        self.table.append_each(np.array([slot]), [emitted])
        known = int(self.table.num_tokens[slot])
        progress = TargetProgress(slot, known, accepted, first, np.arange(accepted + 1))
        self.clock.now += self.rest
        self.drafter.catch_up([progress], HIDDEN)
        return tree
