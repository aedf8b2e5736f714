"""The one place that turns raw logits into the law p of a row, in the same order with and without drafts.

Order: repetition penalty, presence and frequency penalty, logit bias, ban of end ids below min_tokens,
temperature, top-k, top-p, min-p. A row stands for a tree node (or for a drafter's next token): its penalties
see the committed tokens of its sequence and the drafts on its own path, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from gpu_worker.kernels.native import ThreadTeam
from gpu_worker.sampling.law import Law
from gpu_worker.sampling.slot_states import Int64Array, Penalties, SlotStates, to_tensor
from gpu_worker.sampling.truncation import tempered, truncate
from gpu_worker.transfers import to_device


@dataclass(frozen=True)
class Rows:
    """n rows of a logits tensor and what their laws depend on."""

    index: Int64Array  # [n] rows of the logits tensor
    slots: Int64Array  # [n]
    positions: Int64Array  # [n] absolute position (0-based) of the token that the row draws
    path: Callable[[int], Sequence[int]]  # drafts between the committed tokens and the row `index[i]`'s draw

    def __len__(self) -> int:
        return len(self.index)


class LogitsProcessor:
    """Applies each slot's parameters to rows of logits; rows that use nothing are never copied."""

    def __init__(self, states: SlotStates, team: ThreadTeam | None = None) -> None:
        """team: threads of the CPU kernels, for laws that draw on them."""
        self._states = states
        self._team = team

    def adjusted(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[n, V] logits of `rows` after penalties, bias and bans.

        `logits` [N, V] itself if the rows are all of it and none is changed; never changed in place.
        """
        adjusts = self._states.parameters["adjusts"][rows.slots]
        if len(rows) == len(logits) and not adjusts.any():
            return logits  # rows.index is 0 .. N - 1
        index = to_device(rows.index, logits.device)
        selected = logits.index_select(0, index)
        if adjusts.any():
            for slot in np.unique(rows.slots[adjusts]).tolist():
                self._adjust_slot(selected, rows, slot, np.flatnonzero(rows.slots == slot))
        return selected

    def law(self, adjusted: torch.Tensor, slots: Int64Array) -> Law:
        """The laws of adjusted logits [n, V] of `slots` [n], none of them greedy."""
        parameters = self._states.parameters[slots]

        def column(name: str) -> torch.Tensor:
            return to_tensor(parameters[name], adjusted.device)

        log_weights = tempered(adjusted, column("temperature"))
        if not parameters["truncates"].any():
            return Law(log_weights, None, self._team)
        law = truncate(log_weights, column("top_k"), column("top_p"), column("min_p"))
        return replace(law, team=self._team)

    def _adjust_slot(self, selected: torch.Tensor, rows: Rows, slot: int, members: Int64Array) -> None:
        """Changes the rows `members` [m] of `selected` [n, V], all of one slot, in place."""
        states = self._states
        device = selected.device
        at = to_device(members, device)
        values = selected.index_select(0, at)  # [m, V]
        if slot in states.penalties:
            paths = [rows.path(int(rows.index[i])) for i in members]
            values = _penalised(values, states.penalties[slot], paths)
        if slot in states.bias:
            ids, bias = states.bias[slot]
            values.index_add_(1, ids, bias.expand(len(members), -1))
        if slot in states.end_ids:
            parameters = states.parameters[slot]
            number = (
                rows.positions[members] - parameters["num_prompt_tokens"] + 1
            )  # of the token drawn, from 1
            banned = to_device(number <= parameters["min_tokens"], device)
            ends = states.end_ids[slot]
            values[:, ends] = values[:, ends].masked_fill(banned[:, None], -torch.inf)
        selected.index_copy_(0, at, values)


def _penalised(values: torch.Tensor, penalties: Penalties, paths: list[Sequence[int]]) -> torch.Tensor:
    """values [m, V] (overwritten) under penalties whose counts include each row's own path."""
    counts = penalties.output_counts.expand(len(paths), -1)
    drafts = [(i, token) for i, path in enumerate(paths) for token in path]
    if drafts:
        where = torch.tensor(drafts, dtype=torch.int64, device=values.device)
        ones = counts.new_ones(len(drafts))
        counts = counts.clone().index_put_((where[:, 0], where[:, 1]), ones, accumulate=True)
    generated = counts > 0
    if penalties.repetition != 1.0:
        factor = penalties.repetition
        repeated = torch.where(values > 0, values / factor, values * factor)
        values = torch.where(generated | penalties.in_prompt, repeated, values)
    if penalties.presence != 0.0:
        values.sub_(generated.to(values.dtype), alpha=penalties.presence)
    if penalties.frequency != 0.0:
        values.sub_(counts, alpha=penalties.frequency)
    return values
