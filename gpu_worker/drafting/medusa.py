"""Medusa: every head's best candidates at once, as a chain or a sparse tree of their products.

Source: Cai et al., arXiv 2401.10774, sections 2.1.1 and 2.3.3. With known tokens t_0 .. t_{n-1}, of which the target
drew the last from H_{n-2}, head k predicts t_{n+k} from that same hidden state. Nothing but it is carried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.draft_tree import DraftTree, tree_of
from gpu_worker.drafting.base import DraftRequest, TargetHidden, TargetProgress
from gpu_worker.drafting.choice import ChoiceOfDrafts
from gpu_worker.drafting.tree_shape import MAX_NODES, ProductTree, assumed_hit_rates, build_product_tree
from gpu_worker.models.heads.medusa import MedusaHeads
from gpu_worker.request_state import RequestTable
from gpu_worker.sampling.sampler import Sampler
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission

Candidates = list[tuple[int, float]]  # (id, log-probability), best first; -inf: cannot be drawn


class MedusaDrafter:
    """The shape of a tree is settled when the heads are loaded; a budget takes its first nodes, which are its best."""

    method = SpeculationMethod.MEDUSA
    keeps_state = True
    hidden_layers: tuple[int, ...] | None = ()

    def __init__(
        self,
        heads: MedusaHeads,
        sampler: Sampler,
        table: RequestTable,
        max_depth: int,
        least_probability: float = 0.0,
        *,
        tree: bool,
    ) -> None:
        """max_depth bounds the levels; without `tree` each has one candidate.

        least_probability: of a path being right, as the hit rates have it, from which on it is worth a row.
        """
        config = heads.config
        self._heads = heads
        self._table = table
        self._choices = [
            ChoiceOfDrafts(output, heads.token_ids, config.vocab_size, sampler) for output in heads.outputs
        ]
        self._shared_output = all(output is heads.outputs[0] for output in heads.outputs)
        depth = min(max_depth, config.num_medusa_heads)
        rates = config.hit_rates or assumed_hit_rates(config.num_medusa_heads)
        self._shape = build_product_tree(
            [r if tree else r[:1] for r in rates[:depth]], MAX_NODES, least_probability
        )
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
        slots = [p.slot for p in progress]
        rows = torch.tensor([int(p.rows[-1]) for p in progress], device=hidden.normed.device)
        self._hidden[torch.tensor(slots, device=self._hidden.device)] = hidden.normed[rows]
        self._ready[slots] = [p.num_known > p.num_computed for p in progress]

    def num_computed_after(self, progress: TargetProgress) -> int:
        """Every known token: there is no KV that could be missing."""
        return progress.num_known

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTree:
        """See Drafter.propose."""
        slots = [request.slot for request in requests]
        shapes = [
            self._shape.best(request.num_draft_tokens if self._ready[request.slot] else 0)
            for request in requests
        ]
        candidates = self._candidates(slots, shapes)
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        for r, shape in enumerate(shapes):
            drafted, above = _nodes(shape, [of_depth[r] for of_depth in candidates])
            tokens.append(drafted)
            parents.append(above)
        roots = self._table.last_tokens(np.array(slots, dtype=np.int64)).tolist()
        return tree_of(roots, tokens, parents, self._table.device)

    def _candidates(self, slots: list[int], shapes: list[ProductTree]) -> list[list[Candidates]]:
        """By depth and request: the candidates of that depth, as many as any tree has room for."""
        widths = [0] * max((len(shape.widths) for shape in shapes), default=0)
        for shape in shapes:
            for depth, width in enumerate(shape.widths):
                widths[depth] = max(widths[depth], width)
        if not widths:
            return []
        index = torch.tensor(slots, device=self._hidden.device)
        states = self._heads.forward(self._hidden[index])  # [R, heads, h]
        lengths = self._table.num_tokens[slots].tolist()
        if not self._shared_output:
            return [
                self._children(k, states[:, k], slots, [n + k for n in lengths], width)
                for k, width in enumerate(widths)
            ]
        # All depths in one pass over the output rows, which cost more to read than to multiply.
        depths = range(len(widths))
        rows = states[:, : len(widths)].transpose(0, 1).flatten(0, 1)  # by depth, then request
        positions = [n + k for k in depths for n in lengths]
        found = self._children(0, rows, slots * len(widths), positions, max(widths))
        count = len(slots)
        return [
            [best[:width] for best in found[k * count : (k + 1) * count]] for k, width in enumerate(widths)
        ]

    def _children(
        self, head: int, states: torch.Tensor, slots: list[int], positions: list[int], width: int
    ) -> list[Candidates]:
        nothing: list[list[int]] = [[] for _ in slots]
        found = self._choices[head].children(states.contiguous(), slots, positions, nothing, width)
        return [list(zip(*row, strict=True)) for row in zip(*found, strict=True)]


def _nodes(shape: ProductTree, candidates: list[Candidates]) -> tuple[list[int], list[int]]:
    """Tokens and parents of a request's nodes; candidates[d]: those of depth d + 1.

    What cannot be drawn (it was truncated away) gets no node, and neither does what hangs below it.
    """
    tokens: list[int] = []
    parents: list[int] = []
    places = {-1: -1}  # of the shape's nodes that are kept
    for node, (rank, parent, depth) in enumerate(zip(shape.ranks, shape.parents, shape.depths, strict=True)):
        token, value = candidates[depth - 1][rank]
        if value > -math.inf and parent in places:
            places[node] = len(tokens)
            tokens.append(token)
            parents.append(places[parent])
    return tokens, parents
