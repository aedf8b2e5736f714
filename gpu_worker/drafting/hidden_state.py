"""Drafting from the target's hidden states: EAGLE-1, EAGLE-2, EAGLE-3 and MTP by the configuration of their head.

Sources: EAGLE (arXiv 2401.15077, section 4), EAGLE-2 (2406.16858, section 4), EAGLE-3 (2503.01840, section 3), MTP
(DeepSeek-V3, 2412.19437, section 2.2). Tokens are counted from 0 here. The pair (t_i, H_{i-1}), of a token and the
target's hidden state before it, predicts t_{i+1}; its KV lies at slot i of the sequence's pages, the slot of its token,
so that a page's draft KV depends on the page's own prefix alone and a prefix hit resumes exactly. What a hit needs
besides is the hidden state at the end of its last page: those are kept beside the KV, one per page.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.batching import SequenceRows, build_forward_batch, hide_first_token
from gpu_worker.draft_tree import DraftTree
from gpu_worker.drafting.base import DraftRequest, TargetHidden, TargetProgress
from gpu_worker.drafting.choice import ChoiceOfDrafts
from gpu_worker.drafting.growth import grow_drafts
from gpu_worker.drafting.one_call import OneCall
from gpu_worker.drafting.tree_growth import CHAINS, TreeShape
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.kv_pool import PagedPool
from gpu_worker.models.heads.base import DraftHead, DraftsInOneCall, HeadRows
from gpu_worker.request_state import RequestTable
from gpu_worker.row_selection import put_rows, take_rows
from gpu_worker.sampling.sampler import Sampler
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission


class HiddenStateDrafter:
    """Chains or trees from a decoder head; a high-water mark per slot says how far its KV is valid.

    Expansion of a round (draft tokens behind the last known one) writes provisional KV, which the next catch-up
    overwrites with pairs made of the target's own hidden states.
    """

    keeps_state = True

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
        self.method = method
        config = head.config
        self.hidden_layers = config.hidden_layers(num_target_layers)
        self._head = head
        self._pool = pool
        self._attention = attention
        self._table = table
        self._choice = ChoiceOfDrafts(head.output, head.token_ids, config.vocab_size, sampler)
        self._shape = shape
        self._first = 0 if config.attends_first_slot else 1  # the first slot with a pair
        # One call drafts it all, unless the shape is a fixed one, or keys begin in the middle of a page: published
        # heads do not attend slot 0.
        simple = self._first == 0 and shape.fixed is None
        self._one_call: OneCall | None = None
        if simple and isinstance(head, DraftsInOneCall):
            self._one_call = OneCall(head.tree, pool, recycles=True)
        slots, h, size = table.num_slots, config.hidden_size, config.feature_size

        def zeros(rows: int, width: int) -> torch.Tensor:
            return torch.zeros(rows, width, dtype=head.dtype, device=head.device)

        self._computed = np.zeros(slots, dtype=np.int64)  # leading tokens with valid draft KV
        self._ready = np.zeros(slots, dtype=np.bool_)  # the mark has reached the last known token
        self._recycled = zeros(slots, h)  # the head's outputs at that token
        self._normed = zeros(slots, h)
        self._before = zeros(slots, size)  # target features of the last computed token
        self._page_ends = zeros(num_pages, size)  # of the last token of each full page

    def admit(self, admission: Admission) -> None:
        """See Drafter.admit; pages of a prefix hit hold this drafter's KV wherever they hold the target's."""
        self._computed[admission.slot] = admission.num_cached_tokens
        self._ready[admission.slot] = False

    def release(self, slot: int) -> None:
        """See Drafter.release."""
        self._computed[slot] = 0
        self._ready[slot] = False

    def prefill(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """See Drafter.prefill."""
        self._consume(progress, hidden)

    def catch_up(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """See Drafter.catch_up."""
        self._consume(progress, hidden)

    def num_computed_after(self, progress: TargetProgress) -> int:
        """See Drafter.num_computed_after."""
        return self._goal(progress)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTree:
        """See Drafter.propose."""
        wanted = [self._room(request) for request in requests]
        slots = [request.slot for request in requests]
        state = HeadRows(take_rows(self._recycled, slots), take_rows(self._normed, slots))
        return grow_drafts(
            self._table, slots, wanted, self._shape, state, self._expand, self._choice, self._one_call
        )

    def _room(self, request: DraftRequest) -> int:
        """Draft tokens that this request can get."""
        slot = request.slot
        if not self._ready[slot]:
            return 0
        limit = min(self._head.config.max_position_embeddings, self._table.capacity(slot))
        room = limit - int(self._table.num_tokens[slot])
        if self._shape.is_chain:
            room += 1  # a chain's last token is not run
        return max(0, min(request.num_draft_tokens, room))

    def _expand(self, rows: list[SequenceRows], recycled: torch.Tensor) -> HeadRows:
        """Runs the head over drafts, each paired with the head's own state."""
        return self._head.forward(self._batch(rows), recycled, self._pool, self._attention, recycled=True)

    def _batch(self, rows: list[SequenceRows]) -> ForwardBatch:
        batch = build_forward_batch(self._table, rows)
        return batch if self._first == 0 else hide_first_token(batch, self._table, rows)

    def _goal(self, progress: TargetProgress) -> int:
        """Where the mark will be: every known token whose predecessor's hidden state there is, and that has a slot."""
        return min(
            progress.num_known,
            self._table.capacity(progress.slot),
            self._head.config.max_position_embeddings,
        )

    def _consume(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """Runs the head over the pairs that became complete, and keeps what later pairs will need."""
        features = hidden.features(self.hidden_layers)  # [T, F]
        num_rows, zeros = len(features), len(features) + len(progress)
        rows: list[SequenceRows] = []
        wanted: list[int] = []  # of `features`, then each sequence's state before them, then zeros
        reached: list[TargetProgress] = []
        for place, p in enumerate(progress):
            start, goal = max(int(self._computed[p.slot]), self._first), self._goal(p)
            if (
                goal <= start or start < p.first
            ):  # past a limit of its own, which ends its use for the sequence
                self._ready[p.slot] = False
                continue
            if start == p.first:  # its predecessor was computed before this step
                self._recall(p)
                wanted.append(zeros if start == 0 else num_rows + place)
            wanted += p.rows[max(start - 1 - p.first, 0) : goal - 1 - p.first].tolist()
            rows.append(SequenceRows(p.slot, start, goal - start))
            reached.append(p)
        if rows:
            sources = features
            if max(wanted) >= num_rows:
                before = take_rows(self._before, [p.slot for p in progress])
                sources = torch.cat([features, before, features.new_zeros(1, features.shape[1])])
            self._run(rows, reached, take_rows(sources, wanted))
        self._keep(progress, features)

    def _recall(self, progress: TargetProgress) -> None:
        """Behind a page the hidden state before a step's first token is the page's: this slot may never have had it.

        A row of one token needs that too: it may be all that a prefix hit left of a prompt.
        """
        page_index, offset = divmod(progress.first, self._table.page_size)
        if page_index and not offset:
            page = int(self._table.pages[progress.slot, page_index - 1])
            self._before[progress.slot] = self._page_ends[page]

    def _run(self, rows: list[SequenceRows], reached: list[TargetProgress], pairs: torch.Tensor) -> None:
        """One pass over `rows` with features pairs [rows, F]; what it gives at each sequence's end is kept."""
        result = self._head.forward(self._batch(rows), pairs, self._pool, self._attention, recycled=False)
        ends = list(accumulate(row.num_known for row in rows))
        for row, p in zip(rows, reached, strict=True):
            self._computed[row.slot] = row.first + row.num_known
            at_end = self._computed[row.slot] == self._table.num_tokens[row.slot]
            self._ready[row.slot] = at_end and p.num_known > p.num_computed
        last, slots = [end - 1 for end in ends], [row.slot for row in rows]
        put_rows(self._recycled, slots, take_rows(result.recycled, last))
        put_rows(self._normed, slots, take_rows(result.normed, last))

    def _keep(self, progress: Sequence[TargetProgress], features: torch.Tensor) -> None:
        """Features of page ends, for prefix hits, and of the last token of a chunk, for the next chunk."""
        page_size = self._table.page_size
        pages: list[int] = []
        sources: list[int] = []
        for p in progress:
            end = p.num_computed
            for stop in range((p.first // page_size + 1) * page_size, end + 1, page_size):
                pages.append(int(self._table.pages[p.slot, stop // page_size - 1]))
                sources.append(int(p.rows[stop - 1 - p.first]))
            if p.num_known == end:  # more of the prompt is to come
                self._before[p.slot] = features[int(p.rows[-1])]
        if pages:
            put_rows(self._page_ends, pages, take_rows(features, sources))
