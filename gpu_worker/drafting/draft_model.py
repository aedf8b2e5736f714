"""Draft-target speculation: a smaller causal LM of the same vocabulary proposes a chain.

Source: Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). The draft's KV lives in the same pages
as the target's, in tensors of its own. Its rows run one token ahead of the target's: after each step it consumes the
token that the target drew last too, so that the first draft token of the next round is already known (`carried`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.batching import SequenceRows, build_forward_batch
from gpu_worker.draft_tree import DraftTree, chain_tree
from gpu_worker.drafting.base import DraftRequest, TargetHidden, TargetProgress
from gpu_worker.kv_pool import PagedPool
from gpu_worker.models.base import CausalLM
from gpu_worker.request_state import RequestTable
from gpu_worker.sampling.sampler import Sampler
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission


class DraftModelDrafter:
    """Chains drawn from a second model; one high-water mark per slot says how far its KV is valid.

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
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._sampler = sampler
        self._table = table
        self._max_rows = max_rows
        self.max_context_tokens = model.config.max_position_embeddings
        num_slots = table.num_slots
        self._computed = np.zeros(num_slots, dtype=np.int64)  # leading tokens with valid draft KV
        self._fed: list[list[int]] = [
            [] for _ in range(num_slots)
        ]  # drafts of this round whose KV was written
        # first draft token of the next round with its law (rejection rule only); None: not known
        self._carried: list[tuple[int, torch.Tensor | None] | None] = [None] * num_slots

    def admit(self, admission: Admission) -> None:
        """See Drafter.admit."""
        self._computed[admission.slot] = min(admission.num_draft_cached_tokens, self.max_context_tokens)
        self._fed[admission.slot] = []
        self._carried[admission.slot] = None

    def release(self, slot: int) -> None:
        """See Drafter.release."""
        self._computed[slot] = 0
        self._fed[slot] = []
        self._carried[slot] = None

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
        """See Drafter.propose; g draft tokens cost g - 1 draft forward passes of one row each."""
        table = self._table
        drafts: list[list[int]] = [[] for _ in requests]
        laws: list[list[torch.Tensor]] = [[] for _ in requests]
        wanted = []
        for request in requests:
            n = int(table.num_tokens[request.slot])
            room = min(self.max_context_tokens, table.capacity(request.slot)) - n
            ready = self._carried[request.slot] is not None and int(self._computed[request.slot]) == n
            # the last draft token needs no KV, so g drafts need room for g - 1 more tokens
            wanted.append(min(request.num_draft_tokens, room + 1) if ready else 0)
        for i, request in enumerate(requests):
            carried = self._carried[request.slot]
            if wanted[i] > 0 and carried is not None:
                drafts[i].append(carried[0])
                if carried[1] is not None:
                    laws[i].append(carried[1])
        for k in range(1, max(wanted, default=0)):
            active = [i for i, count in enumerate(wanted) if count > k]
            slots = [requests[i].slot for i in active]
            lengths = [int(table.num_tokens[slot]) for slot in slots]
            hidden = self._step(slots, lengths, [drafts[i][k - 1] for i in active], k - 1)
            positions = [n + k for n in lengths]
            tokens, q = self._choose(hidden, slots, positions, [drafts[i] for i in active])
            for j, i in enumerate(active):
                drafts[i].append(tokens[j])
                if q is not None:
                    laws[i].append(q[j])
        for i, request in enumerate(requests):
            self._fed[request.slot] = drafts[i][:-1]
        roots = [int(table.known(request.slot)[-1]) for request in requests]
        return chain_tree(roots, drafts, table.device).with_laws(laws)

    def _settle(self, progress: TargetProgress) -> None:
        """Keeps the KV of the fed drafts that came; what came may be another method's, drafted in the same step."""
        slot = progress.slot
        n = int(self._computed[slot])
        came = self._table.known(slot)[n : n + len(self._fed[slot])].tolist()
        kept = 0
        while kept < len(came) and came[kept] == self._fed[slot][kept]:
            kept += 1
        self._computed[slot] += kept
        self._fed[slot] = []
        self._carried[slot] = None

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
        """One draft pass; a slot that reaches its last known token gets the first draft of the next round."""
        batch = build_forward_batch(self._table, rows)
        hidden = self._model.forward(batch, self._pool, self._attention)  # [T, h]
        ready = []
        for row, end in zip(rows, batch.attention.qo_indptr[1:].tolist(), strict=True):
            self._computed[row.slot] = row.first + row.num_known
            self._carried[row.slot] = None
            if self._computed[row.slot] == self._table.num_tokens[row.slot]:
                ready.append((row.slot, end - 1))
        if not ready:
            return
        hidden = hidden[torch.tensor([end for _, end in ready], device=hidden.device)]
        slots = [slot for slot, _ in ready]
        positions = [int(self._table.num_tokens[slot]) for slot in slots]
        tokens, q = self._choose(hidden, slots, positions, [[] for _ in slots])
        for j, slot in enumerate(slots):
            self._carried[slot] = (tokens[j], None if q is None else q[j])

    def _step(self, slots: list[int], lengths: list[int], tokens: list[int], offset: int) -> torch.Tensor:
        """One draft row per slot: token at index length + offset. Returns hidden [M, h]."""
        rows = [
            SequenceRows(slot, n + offset, 0, (token,), (n + offset,))
            for slot, n, token in zip(slots, lengths, tokens, strict=True)
        ]
        batch = build_forward_batch(self._table, rows)
        return self._model.forward(batch, self._pool, self._attention)

    def _choose(
        self, hidden: torch.Tensor, slots: list[int], positions: list[int], drafted: list[list[int]]
    ) -> tuple[list[int], torch.Tensor | None]:
        """The draft token behind each row of hidden [M, h], and the law it was drawn from (Sampler.propose)."""
        if self._sampler.proposes_best(slots):
            return self._model.compute_argmax(hidden).tolist(), None
        return self._sampler.propose(self._model.compute_logits(hidden), slots, positions, drafted)
