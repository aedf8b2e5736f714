"""Draft-target speculation: a smaller causal LM of the same vocabulary proposes chains or trees.

Source: Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318); trees as in tree_growth.py. The draft's
KV lives in the same pages as the target's, in tensors of its own. Its rows run one token ahead of the target's: after
each step it consumes the token that the target drew last too, and keeps what it computed there (`_hidden`), from which
the next round's first drafts are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.batching import SequenceRows, build_forward_batch
from gpu_worker.draft_tree import DraftTree
from gpu_worker.drafting.base import DraftRequest, TargetHidden, TargetProgress
from gpu_worker.drafting.choice import ChoiceOfDrafts
from gpu_worker.drafting.growth import grow_drafts
from gpu_worker.drafting.one_call import OneCall
from gpu_worker.drafting.tree_growth import CHAINS, TreeShape
from gpu_worker.kv_pool import PagedPool
from gpu_worker.models.base import CausalLM, OutputHead
from gpu_worker.models.heads.base import HeadRows
from gpu_worker.models.native import NativeCausalLM
from gpu_worker.request_state import RequestTable
from gpu_worker.row_selection import put_rows, take_rows
from gpu_worker.sampling.sampler import Sampler
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission


class DraftModelDrafter:
    """Drafts from a second model; one high-water mark per slot says how far its KV is valid.

    Steps that did not run the draft (speculation off, another method, a prefix hit without draft KV) leave a hole
    behind the mark. The next prefill or catch_up fills it, in passes of at most max_rows rows; until then the
    drafter stays silent.
    """

    method = SpeculationMethod.DRAFT_MODEL
    keeps_state = True
    hidden_layers = None

    def __init__(
        self,
        model: CausalLM,
        pool: PagedPool,
        attention: AttentionBackend,
        sampler: Sampler,
        table: RequestTable,
        max_rows: int,
        *,
        draft_ids: torch.Tensor | None = None,
        vocab_size: int = 0,
        shape: TreeShape = CHAINS,
    ) -> None:
        """draft_ids [V] int64: the only ids it drafts; None: all. vocab_size: the target's, 0: the draft's own."""
        self._model = model
        self._pool = pool
        self._attention = attention
        self._table = table
        self._max_rows = max_rows
        self._shape = shape
        output: OutputHead
        self._one_call: OneCall | None = None
        if isinstance(model, NativeCausalLM) and shape.fixed is None:
            output = native = model.output_head(draft_ids)
            grow = partial(model.tree, output=native, token_ids=draft_ids)
            self._one_call = OneCall(grow, pool, recycles=False)
        else:
            output = model.output_head(draft_ids)
        self._choice = ChoiceOfDrafts(output, draft_ids, vocab_size or model.config.vocab_size, sampler)
        self.max_context_tokens = model.config.max_position_embeddings
        num_slots = table.num_slots
        self._computed = np.zeros(num_slots, dtype=np.int64)  # leading tokens with valid draft KV
        self._fed: list[list[int]] = [
            [] for _ in range(num_slots)
        ]  # drafts of this round whose KV was written
        self._ready = np.zeros(num_slots, dtype=np.bool_)  # the mark has reached the last known token
        hidden_size = model.config.hidden_size
        self._hidden = torch.zeros(num_slots, hidden_size, dtype=model.dtype, device=model.device)  # there

    def admit(self, admission: Admission) -> None:
        """See Drafter.admit."""
        self._computed[admission.slot] = min(admission.num_draft_cached_tokens, self.max_context_tokens)
        self._fed[admission.slot] = []
        self._ready[admission.slot] = False

    def release(self, slot: int) -> None:
        """See Drafter.release."""
        self._computed[slot] = 0
        self._fed[slot] = []
        self._ready[slot] = False

    def prefill(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """Computes the draft's KV of the prompt rows that the target has just computed."""
        self._consume([(p.slot, p.num_known) for p in progress])

    def catch_up(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """Keeps the KV of accepted drafts (it depends on the tokens alone) and consumes what is missing behind."""
        for p in progress:
            self._settle(p)
        self._consume([(p.slot, p.num_known) for p in progress])

    def num_computed_after(self, progress: TargetProgress) -> int:
        """See Drafter.num_computed_after."""
        return max(int(self._computed[progress.slot]), self._limit(progress.slot, progress.num_known))

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTree:
        """See Drafter.propose; a chain of g draft tokens costs g - 1 draft forward passes of one row each."""
        wanted = [self._room(request) for request in requests]
        slots = [request.slot for request in requests]
        hidden = take_rows(self._hidden, slots)
        state = HeadRows(hidden, hidden)
        tree = grow_drafts(
            self._table, slots, wanted, self._shape, state, self._expand, self._choice, self._one_call
        )
        return self._remember_fed(slots, tree)

    def _remember_fed(self, slots: list[int], tree: DraftTree) -> DraftTree:
        """The tokens of chains whose KV was written in their own slots: all but the last, which was not run."""
        if self._shape.is_chain:
            for slot, begin, end in zip(slots, tree.host.indptr, tree.host.indptr[1:], strict=False):
                self._fed[slot] = tree.host.tokens[begin + 1 : end - 1]
        return tree

    def _room(self, request: DraftRequest) -> int:
        """Draft tokens that this request can get."""
        slot = request.slot
        n = int(self._table.num_tokens[slot])
        if not self._ready[slot] or self._computed[slot] != n:
            return 0
        room = min(self.max_context_tokens, self._table.capacity(slot)) - n
        if self._shape.is_chain:
            room += 1  # a chain's last token is not run
        return max(0, min(request.num_draft_tokens, room))

    def _settle(self, progress: TargetProgress) -> None:
        """Keeps the KV of the fed drafts that came; what came may be another method's, drafted in the same step.

        A tree's drafts count as none: their KV does not lie in the slots of their tokens.
        """
        slot = progress.slot
        n = int(self._computed[slot])
        came = self._table.known(slot)[n : n + len(self._fed[slot])].tolist()
        kept = 0
        while kept < len(came) and came[kept] == self._fed[slot][kept]:
            kept += 1
        self._computed[slot] += kept
        self._fed[slot] = []
        self._ready[slot] = False

    def _limit(self, slot: int, num_known: int) -> int:
        return min(num_known, self.max_context_tokens, self._table.capacity(slot))

    def _consume(self, goals: Sequence[tuple[int, int]]) -> None:
        """Runs the draft over tokens computed .. goal - 1 of each (slot, goal), in passes of at most max_rows rows."""
        pending = [(slot, self._limit(slot, goal)) for slot, goal in goals]
        while pending:
            rows: list[SequenceRows] = []
            room = self._max_rows
            for slot, goal in pending:
                count = min(goal - int(self._computed[slot]), room)
                if count > 0:
                    rows.append(SequenceRows(slot, int(self._computed[slot]), count))
                    room -= count
            if rows:
                self._run(rows)
            pending = [(slot, goal) for slot, goal in pending if self._computed[slot] < goal]

    def _run(self, rows: list[SequenceRows]) -> None:
        """One draft pass; a slot that reaches its last known token is ready for the next round."""
        batch = build_forward_batch(self._table, rows)
        hidden = self._model.forward(batch, self._pool, self._attention)  # [T, h]
        slots, ends = [], []
        for row, end in zip(rows, batch.attention.qo_indptr[1:].tolist(), strict=True):
            self._computed[row.slot] = row.first + row.num_known
            self._ready[row.slot] = self._computed[row.slot] == self._table.num_tokens[row.slot]
            if self._ready[row.slot]:
                slots.append(row.slot)
                ends.append(end - 1)
        if slots:
            put_rows(self._hidden, slots, take_rows(hidden, ends))

    def _expand(self, rows: list[SequenceRows], _: torch.Tensor) -> HeadRows:
        """Runs the model over drafts; it recycles nothing."""
        batch = build_forward_batch(self._table, rows)
        hidden = self._model.forward(batch, self._pool, self._attention)
        return HeadRows(hidden, hidden)
