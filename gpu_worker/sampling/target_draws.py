"""The target's own tokens: the best one or a draw under coupled noise at each row, as tensors that nobody reads here.

Under the coupled rule, and for greedy sequences, these tokens are all that acceptance looks at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.draft_tree import DraftTree
from gpu_worker.sampling.logits import LogitsProcessor, Rows
from gpu_worker.sampling.random import coupled_keys
from gpu_worker.sampling.slot_states import Int64Array, SlotStates, to_tensor
from gpu_worker.transfers import to_device
from shared_mem.enums import AcceptanceRule

GREEDY = 0  # beside the values of AcceptanceRule


@dataclass(frozen=True)
class Kind:
    """Slots that go through the same code."""

    rule: int  # GREEDY or an AcceptanceRule
    adjusts: bool

    @property
    def draws_first(self) -> bool:
        """Whether acceptance compares drafts with the target's own tokens, and does nothing else."""
        return self.rule in (GREEDY, AcceptanceRule.COUPLED)


class TargetDraws:
    """Draws for rows of any slots under the coupled rule or none (greedy)."""

    def __init__(self, states: SlotStates, processor: LogitsProcessor) -> None:
        self._states = states
        self._processor = processor

    def by_kind(self, slots: Int64Array) -> Iterator[tuple[Kind, Int64Array]]:
        """Splits positions 0 .. len(slots) - 1 by what their slots need; truncated rows apart from others."""
        parameters = self._states.parameters[slots]
        rule = np.where(parameters["greedy"], GREEDY, parameters["rule"])
        truncates = parameters["truncates"] & ~parameters["greedy"]
        code = rule * 4 + truncates * 2 + parameters["adjusts"]
        for value in np.unique(code).tolist():
            yield Kind(value // 4, bool(value % 2)), np.flatnonzero(code == value)

    def draw(self, kind: Kind, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[n] int64 the token of each of `rows` [n] of logits [N, V], all of one kind that draws first."""
        if kind.rule != GREEDY:
            law = self._processor.law(self._processor.adjusted(logits, rows), rows.slots)
            seeds = to_tensor(self._states.parameters["seed"][rows.slots], logits.device)
            return law.draw(coupled_keys(seeds, to_tensor(rows.positions, logits.device)))
        if kind.adjusts:
            return self._processor.adjusted(logits, rows).argmax(dim=-1)
        best = logits.argmax(dim=-1)  # one pass over all rows costs less than copying some of them
        return best if len(rows) == len(logits) else best.index_select(0, to_device(rows.index, best.device))

    def of_nodes(
        self, tree: DraftTree, logits: torch.Tensor, slots: Int64Array, num_tokens: Int64Array
    ) -> torch.Tensor:
        """[N] int64 the target's token at every node of chains; the slots are of kinds that draw first.

        Arguments as in Sampler.verify. Penalties look at the drafts before a node, and truncation at the logits: both
        are read on the host.
        """
        depths = tree.shape.depths
        owner = np.repeat(np.arange(tree.num_requests), np.diff(tree.indptr))
        positions = num_tokens[owner] + np.array(depths, dtype=np.int64)

        def path(node: int) -> list[int]:
            return tree.host.tokens[node - depths[node] + 1 : node + 1]

        tokens: torch.Tensor | None = None
        for kind, nodes in self.by_kind(slots[owner]):
            drawn = self.draw(kind, logits, Rows(nodes, slots[owner[nodes]], positions[nodes], path))
            if len(nodes) == len(owner):
                return drawn
            tokens = drawn.new_zeros(len(owner)) if tokens is None else tokens
            tokens.index_copy_(0, to_device(nodes, drawn.device), drawn)
        assert tokens is not None, "there are nodes"
        return tokens

    def of_drafts(self, logits: torch.Tensor, slots: list[int], positions: torch.Tensor) -> torch.Tensor:
        """[M] int64 the draft tokens that Sampler.propose would give for DRAFT logits [M, V] at positions [M] int64.

        For slots whose drafts need no more than the best of log q, + coupled noise where they are drawn at random:
        neither the tokens before nor, on the host, the positions matter to them.
        """
        best = logits.argmax(dim=-1)
        drawn = np.array(
            [i for i, slot in enumerate(slots) if slot in self._states.draws_drafts], dtype=np.int64
        )
        if not len(drawn):
            return best
        of = np.array(slots, dtype=np.int64)[drawn]
        seeds = to_tensor(self._states.parameters["seed"][of], logits.device)
        index = to_device(drawn, logits.device)
        law = self._processor.law(logits.index_select(0, index), of)
        keys = coupled_keys(seeds, positions.index_select(0, index))
        return best.index_copy_(0, index, law.draw(keys))
