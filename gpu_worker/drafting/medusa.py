"""Medusa: every head's best candidates at once, as a chain or a sparse tree of their products.

Source: Cai et al., arXiv 2401.10774, sections 2.1.1 and 2.3.3. With known tokens t_0 .. t_{n-1}, of which the target
drew the last from H_{n-2}, head k predicts t_{n+k} from that same hidden state. Nothing but it is carried. Which paths
are considered at all follows from measured hit rates; which of them are verified in a step, from the heads' own
probabilities in that step (as EAGLE-2 ranks its nodes: arXiv 2406.16858, section 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from gpu_worker.draft_tree import MAX_NODES, DraftTree, tree_of
from gpu_worker.drafting.base import DraftRequest, TargetHidden, TargetProgress
from gpu_worker.drafting.choice import ChoiceOfDrafts
from gpu_worker.drafting.tree_growth import best_first, confidences
from gpu_worker.drafting.tree_shape import (
    ProductTree,
    assumed_hit_rates,
    build_product_tree,
    with_best_chain,
)
from gpu_worker.models.heads.medusa import MedusaHeads
from gpu_worker.request_state import RequestTable
from gpu_worker.row_selection import put_rows, take_rows
from gpu_worker.sampling.sampler import Sampler
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission

Candidates = list[tuple[int, float]]  # (id, log-probability), best first; -inf: cannot be drawn


class MedusaDrafter:
    """The paths to consider are settled when the heads are loaded; each step verifies the best of them."""

    method = SpeculationMethod.MEDUSA
    keeps_state = True
    hidden_layers: tuple[int, ...] | None = ()

    def __init__(
        self,
        heads: MedusaHeads,
        sampler: Sampler,
        table: RequestTable,
        max_depth: int,
        least_value: float = -math.inf,
        *,
        tree: bool,
    ) -> None:
        """max_depth bounds the levels; without `tree` each has one candidate.

        least_value: log-probability of a path below which it is not worth a row of verification.
        """
        config = heads.config
        self._heads = heads
        self._table = table
        self._choices = [
            ChoiceOfDrafts(output, heads.token_ids, config.vocab_size, sampler) for output in heads.outputs
        ]
        self._shared_output = all(output is heads.outputs[0] for output in heads.outputs)
        depth = min(max_depth, config.num_medusa_heads)
        measured = config.hit_rates or assumed_hit_rates(config.num_medusa_heads)
        rates = [r if tree else r[:1] for r in measured[:depth]]
        # However rarely the last heads hit on average, in a step they may be sure.
        shape = with_best_chain(build_product_tree(rates, MAX_NODES - depth), rates)
        # By the greatest budget of a step: no node of the best tree of n lies deeper than n.
        self._shapes = [shape.best(MAX_NODES, levels) for levels in range(depth + 1)]
        self._widths = [levels.widths for levels in self._shapes]
        self._least_value = least_value
        self._hidden = torch.zeros(
            table.num_slots, config.hidden_size, dtype=heads.dtype, device=heads.device
        )
        self._ready = np.zeros(table.num_slots, dtype=np.bool_)

    def admit(self, admission: Admission) -> None:
        """See Drafter.admit."""
        self._ready[admission.slot] = False

    def release(self, slot: int) -> None:
        """See Drafter.release."""
        self._ready[slot] = False

    def prefill(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """See Drafter.prefill."""
        self.catch_up(progress, hidden)

    def catch_up(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """Keeps the hidden state that the target drew each sequence's last token from."""
        last = take_rows(hidden.normed, [int(p.rows[-1]) for p in progress])
        put_rows(self._hidden, [p.slot for p in progress], last)
        for p in progress:
            self._ready[p.slot] = p.num_known > p.num_computed

    def num_computed_after(self, progress: TargetProgress) -> int:
        """Every known token: there is no KV that could be missing."""
        return progress.num_known

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTree:
        """See Drafter.propose."""
        slots = [request.slot for request in requests]
        budgets = [request.num_draft_tokens if self._ready[request.slot] else 0 for request in requests]
        levels = min(max(budgets, default=0), len(self._shapes) - 1)
        shape = self._shapes[levels]
        candidates = self._candidates(slots, self._widths[levels])
        drafted = [
            _best_nodes(shape, [of_depth[r] for of_depth in candidates], budget, self._least_value)
            for r, budget in enumerate(budgets)
        ]
        return tree_of(
            self._table.last_tokens(slots),
            [nodes.tokens for nodes in drafted],
            [nodes.parents for nodes in drafted],
            self._table.device,
            [confidences(nodes.parents, nodes.values) for nodes in drafted],
        )

    def _candidates(self, slots: list[int], widths: tuple[int, ...]) -> list[list[Candidates]]:
        """By depth and request: the candidates of that depth, as many as `widths` says."""
        if not widths:
            return []
        hidden = take_rows(self._hidden, slots)
        if self._choices[0].takes_best(slots):
            found = self._heads.candidates(hidden, len(widths), max(widths))
            if found is not None:
                pairs = [
                    [list(zip(*of, strict=True)) for of in zip(*of_row, strict=True)]
                    for of_row in zip(*found, strict=True)
                ]
                return [[of_row[k][:width] for of_row in pairs] for k, width in enumerate(widths)]
        states = self._heads.forward(hidden, len(widths))  # [R, depths, h]
        lengths = [int(self._table.num_tokens[slot]) for slot in slots]
        if not self._shared_output:
            return [
                self._children(k, states[:, k], slots, [n + k for n in lengths], width)
                for k, width in enumerate(widths)
            ]
        # All depths in one pass over the output rows, which cost more to read than to multiply.
        depths = range(len(widths))
        rows = states.transpose(0, 1).flatten(0, 1)  # by depth, then request
        positions = [n + k for k in depths for n in lengths]
        of_all = self._children(0, rows, slots * len(widths), positions, max(widths))
        count = len(slots)
        return [
            [best[:width] for best in of_all[k * count : (k + 1) * count]] for k, width in enumerate(widths)
        ]

    def _children(
        self, head: int, states: torch.Tensor, slots: list[int], positions: list[int], width: int
    ) -> list[Candidates]:
        nothing: list[list[int]] = [[] for _ in slots]
        found = self._choices[head].children(states.contiguous(), slots, positions, nothing, width)
        return [list(zip(*row, strict=True)) for row in zip(*found, strict=True)]


class _Nodes(NamedTuple):
    """What a request's tree has behind its root, parents first."""

    tokens: list[int]
    parents: list[int]  # -1: the root
    values: list[float]  # log-probability of the path


def _best_nodes(shape: ProductTree, candidates: list[Candidates], budget: int, least_value: float) -> _Nodes:
    """The best `budget` nodes of the shape; candidates[d]: those of depth d + 1.

    What cannot be drawn (it was truncated away) or is worth too little gets no node, and neither does what hangs below
    it. A node is worth no more than its parent, so the best of all form a tree.
    """
    values: list[float] = []
    for rank, parent, depth in zip(shape.ranks, shape.parents, shape.depths, strict=True):
        found = candidates[depth - 1]
        value = min(0.0, found[rank][1]) if rank < len(found) else -math.inf  # a small vocabulary has fewer
        values.append(value + (values[parent] if parent >= 0 else 0.0))
    best = best_first(values, shape.depths, budget)
    kept = [node for node in best if values[node] > -math.inf and values[node] >= least_value]
    kept.sort(key=lambda node: shape.depths[node])  # of one depth the best stay first
    place = {node: i for i, node in enumerate(kept)} | {-1: -1}
    return _Nodes(
        [candidates[shape.depths[node] - 1][shape.ranks[node]][0] for node in kept],
        [place[shape.parents[node]] for node in kept],
        [values[node] for node in kept],
    )
