"""N-gram drafting (prompt lookup): what followed the longest earlier match of the sequence's own tail.

With a SuffixStore also what followed it in recent outputs of other requests of the same salt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gpu_worker.draft_tree import DraftTree, chain_tree
from gpu_worker.drafting.base import DraftRequest, TargetHidden, TargetProgress
from gpu_worker.drafting.suffix_store import SuffixStore
from gpu_worker.request_state import Int64Array, RequestTable
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission


@dataclass
class _Output:
    """What a running sequence has generated: its tokens first .. end - 1 in the table."""

    salt_id: int
    first: int
    end: int


class NgramDrafter:
    """Proposes a chain copied from prompt + output; needs no weights and no KV."""

    method = SpeculationMethod.NGRAM
    hidden_layers = None

    def __init__(
        self,
        table: RequestTable,
        min_match: int = 2,
        max_match: int = 8,
        store: SuffixStore | None = None,
        salt_of: Callable[[Admission], int] | None = None,
    ) -> None:
        """store: recent outputs to search as well; salt_of tells whose outputs a sequence may see, and be seen by."""
        assert (store is None) == (salt_of is None), "a store is of no use, and not safe, without salts"
        self._table = table
        self._min_match = min_match
        self._max_match = max_match
        self._store = store
        self._salt_of = salt_of
        self.keeps_state = store is not None  # outputs are stored when their sequence ends
        self._outputs: dict[int, _Output] = {}  # by slot

    def admit(self, admission: Admission) -> None:
        """The table holds the tokens; only whose they are is noted."""
        if self._salt_of is not None:
            self._outputs[admission.slot] = _Output(
                self._salt_of(admission), admission.num_prompt_tokens, len(admission.token_ids)
            )

    def release(self, slot: int) -> None:
        """The output goes into the store. The table has forgotten the slot's length by now, not yet its tokens."""
        output = self._outputs.pop(slot, None)
        if self._store is not None and output is not None:
            self._store.add(self._table.tokens[slot, output.first : output.end], output.salt_id)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTree:
        """See Drafter.propose."""
        roots: list[int] = []
        drafts: list[list[int]] = []
        confidences: list[list[float]] = []
        for request in requests:
            tokens = self._table.known(request.slot)
            roots.append(int(tokens[-1]))
            draft, length = self._continuation(request, tokens)
            drafts.append(draft)
            # no probability, but the longer the match the surer: a portfolio learns what it is worth
            confidences.append([length / (self._max_match + 1)] * len(draft))
        return chain_tree(roots, drafts, self._table.device, confidences)

    def _continuation(self, request: DraftRequest, tokens: Int64Array) -> tuple[list[int], int]:
        """Draft and length of the match: the longer counts, in the own text or the store; of equal ones the own."""
        start, length = find_match(tokens, self._min_match, self._max_match)
        output = self._outputs.get(request.slot)
        if self._store is not None and output is not None and length < self._max_match:
            stored = self._store.find(tokens, request.num_draft_tokens, output.salt_id)
            if stored is not None and stored.length > length:
                return stored.continuation, min(stored.length, self._max_match)
        return (_continued(tokens, start, request.num_draft_tokens) if length else []), length

    def prefill(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """See catch_up."""
        self.catch_up(progress, hidden)

    def catch_up(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """Nothing to compute; the end of the output is noted."""
        for p in progress:
            if p.slot in self._outputs:
                self._outputs[p.slot].end = p.num_known

    def num_computed_after(self, progress: TargetProgress) -> int:
        """Always 0: there is no draft KV."""
        return 0


def find_match(tokens: Int64Array, min_match: int, max_match: int) -> tuple[int, int]:
    """The longest match of the tail of `tokens` [n] inside them, the latest one among equals.

    Returns the place behind the match and its length, (0, 0) if it is shorter than min_match; beyond max_match tokens a
    longer match counts no more. Source: prompt lookup decoding (Saxena, 2023), with the longest match as in LLMA
    (arXiv 2304.04487).
    """
    n = len(tokens)
    if n <= min_match:
        return 0, 0
    # ends of candidate matches: earlier places of the last token
    ends = np.flatnonzero(tokens[: n - 1] == tokens[n - 1])
    best = ends
    length = 1
    while len(ends) and length < max_match:
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[n - 1 - length]]
        if not len(ends):
            break
        best = ends
        length += 1
    if length < min_match or not len(best):
        return 0, 0
    return int(best[-1]) + 1, length


def _continued(tokens: Int64Array, start: int, num_draft_tokens: int) -> list[int]:
    """What follows from `start`; close to the end periodically, the continuation running into the copy itself."""
    period = len(tokens) - start
    return [int(tokens[start + i % period]) for i in range(num_draft_tokens)]
