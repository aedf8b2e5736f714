"""MTP with one draft token: from verification to the next draft token nothing is read back from the device.

The target's tokens drawn at the rows of a verification are the rows' ids shifted by one, with the next token in its
place: at the last known token it draws the token behind it, which is the draft where that was right, and at the draft
the one behind that. So the head runs over all rows as they are, each pair one slot behind its row, and the device picks
the row that counts; the pair of a rejected draft is provisional like any other and overwritten by the next pass. The
next draft token stays on the device too, where the next step's verification takes it from. Source: DeepSeek-V3 (arXiv
2412.19437, section 2.2), for the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.batching import SequenceRows
from gpu_worker.draft_tree import DraftTree, single_drafts_tree
from gpu_worker.drafting.base import DraftRequest, TargetHidden, TargetProgress, UnreadRows
from gpu_worker.drafting.hidden_state import HiddenStateDrafter
from gpu_worker.drafting.tree_growth import CHAINS, TreeShape
from gpu_worker.kv_pool import PagedPool
from gpu_worker.models.heads.base import DraftHead
from gpu_worker.request_state import RequestTable
from gpu_worker.row_selection import put_rows, take_rows
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.sampling.verification import UnreadVerification
from gpu_worker.transfers import to_device
from shared_mem.enums import SpeculationMethod


class OneTokenDrafter(HiddenStateDrafter):
    """Implements FollowsWithoutLengths; drafts what a chain of one drafts without leaving any out.

    Whether a draft is likely enough to be verified could only be read from the device, which costs more than the row.
    """

    def __init__(
        self,
        method: SpeculationMethod,
        head: DraftHead,
        pool: PagedPool,
        attention: AttentionBackend,
        sampler: Sampler,
        table: RequestTable,
        num_pages: int,
        num_target_layers: int,
        shape: TreeShape = CHAINS,
    ) -> None:
        """shape: of no use, since all trees of one draft are chains."""
        super().__init__(method, head, pool, attention, sampler, table, num_pages, num_target_layers, CHAINS)
        # What follows each slot's last known token, where _ready says so and the slot draws plainly.
        self._next = torch.zeros(table.num_slots, dtype=torch.int64, device=head.device)
        self._followed = np.zeros(table.num_slots, dtype=np.bool_)  # in this step, with lengths unread

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTree:
        """See Drafter.propose; runs the output head at most, for slots that penalise, truncate or reject."""
        slots = [request.slot for request in requests]
        drafted = [i for i, request in enumerate(requests) if self._room(request)]
        drafts = take_rows(self._next, [slots[i] for i in drafted]) if drafted else self._next[:0]
        laws: list[list[torch.Tensor]] = [[] for _ in slots]
        others = [place for place, i in enumerate(drafted) if not self._choice.draws_plainly(slots[i])]
        if others:
            names = [slots[drafted[place]] for place in others]
            positions = [int(self._table.num_tokens[slot]) for slot in names]
            tokens, q = self._choice.best(take_rows(self._normed, names), names, positions, [[]] * len(names))
            drafts = drafts.clone()
            put_rows(drafts, others, to_device(np.array(tokens, dtype=np.int64), drafts.device))
            for place, law in zip(others, [] if q is None else q, strict=False):
                laws[drafted[place]].append(law)
        roots = self._table.last_tokens(slots)
        return single_drafts_tree(roots, drafted, drafts).with_laws(laws)

    def follow(
        self, rows: Sequence[UnreadRows], verification: UnreadVerification, hidden: TargetHidden
    ) -> None:
        """See FollowsWithoutLengths.follow."""
        rows = [row for row in rows if self._ready[row.slot] and self._fits(row)]
        if not rows:
            return
        device, slots = self._head.device, [row.slot for row in rows]
        nodes = [row.first_node + k for row in rows for k in range(row.num_rows)]
        sources = [row.first_row + k for row in rows for k in range(row.num_rows)]
        batch = self._batch([_one_slot_on(row) for row in rows])
        batch = replace(batch, input_ids=take_rows(verification.drawn, nodes))
        pairs = take_rows(hidden.features(self.hidden_layers), sources)
        result = self._head.forward(batch, pairs, self._pool, self._attention, recycled=False)
        accepted = take_rows(verification.num_accepted, [row.request for row in rows])
        ends = list(accumulate(row.num_rows for row in rows))
        firsts = [end - row.num_rows for row, end in zip(rows, ends, strict=True)]
        result = result.select(to_device(np.array(firsts), device) + accepted)
        put_rows(self._recycled, slots, result.recycled)
        put_rows(self._normed, slots, result.normed)
        behind = to_device(np.array([row.first + 2 for row in rows]), device) + accepted
        self._choose_next(slots, result.normed, behind)
        self._followed[slots] = True

    def catch_up(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """See Drafter.catch_up; of what was followed already only marks and page ends are missing."""
        followed = [p for p in progress if self._followed[p.slot]]
        left = [p for p in progress if not self._followed[p.slot]]
        for p in followed:
            self._computed[p.slot] = p.num_known
            self._followed[p.slot] = False
        self._keep(followed, hidden.features(self.hidden_layers))
        if left:
            self._consume(left, hidden)

    def _fits(self, row: UnreadRows) -> bool:
        """Whether every pair has a slot and a position, be the draft accepted or not."""
        config, table = self._head.config, self._table
        limit = min(table.capacity(row.slot), config.max_position_embeddings, table.tokens.shape[1])
        return row.first + 1 + row.num_rows <= int(limit)

    def _room(self, request: DraftRequest) -> int:
        return min(1, super()._room(request))

    def _run(self, rows: list[SequenceRows], reached: list[TargetProgress], pairs: torch.Tensor) -> None:
        super()._run(rows, reached, pairs)
        slots = [row.slot for row in rows if self._ready[row.slot]]
        if slots:
            positions = to_device(self._table.num_tokens[slots], self._head.device)
            self._choose_next(slots, take_rows(self._normed, slots), positions)

    def _choose_next(self, slots: list[int], normed: torch.Tensor, positions: torch.Tensor) -> None:
        """The draft token that normed [M, h] gives for positions [M], in slots that draw plainly; others do later."""
        plain = [i for i, slot in enumerate(slots) if self._choice.draws_plainly(slot)]
        if not plain:
            return
        names = [slots[i] for i in plain]
        drafts = self._choice.best_unread(take_rows(normed, plain), names, take_rows(positions, plain))
        put_rows(self._next, names, drafts)


def _one_slot_on(row: UnreadRows) -> SequenceRows:
    """The verification's row or rows, each one slot and position further; their tokens are on the device."""
    behind = range(row.first + 1, row.first + 1 + row.num_rows)
    return SequenceRows(row.slot, behind.start, 0, (0,) * row.num_rows, tuple(behind))
