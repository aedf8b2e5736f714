"""N-gram drafting (prompt lookup): what followed the longest earlier match of the sequence's own tail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu_worker.draft_tree import DraftTree, chain_tree
from gpu_worker.drafting.base import DraftRequest, TargetHidden, TargetProgress
from gpu_worker.request_state import Int64Array, RequestTable
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission


class NgramDrafter:
    """Proposes a chain copied from prompt + output; needs no weights and no KV."""

    method = SpeculationMethod.NGRAM
    keeps_state = False
    hidden_layers = None

    def __init__(self, table: RequestTable, min_match: int = 2, max_match: int = 8) -> None:
        self._table = table
        self._min_match = min_match
        self._max_match = max_match

    def admit(self, admission: Admission) -> None:
        """Nothing to keep: the table holds the tokens."""

    def release(self, slot: int) -> None:
        """Nothing to forget."""

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTree:
        """See Drafter.propose."""
        roots: list[int] = []
        drafts: list[list[int]] = []
        for request in requests:
            tokens = self._table.known(request.slot)
            roots.append(int(tokens[-1]))
            drafts.append(lookup(tokens, request.num_draft_tokens, self._min_match, self._max_match))
        return chain_tree(roots, drafts, self._table.device)

    def prefill(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """Nothing to compute."""

    def catch_up(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """Nothing to compute."""

    def num_computed_after(self, progress: TargetProgress) -> int:
        """Always 0: there is no draft KV."""
        return 0


def lookup(tokens: Int64Array, num_draft_tokens: int, min_match: int, max_match: int) -> list[int]:
    """What followed the longest match of the tail of `tokens` [n] inside them; the latest one among equals.

    Matches shorter than min_match are ignored; beyond max_match tokens a longer match counts no more. A match close
    to the end is continued periodically (its continuation runs into the copy itself). Source: prompt lookup decoding
    (Saxena, 2023), with the longest match as in LLMA (arXiv 2304.04487).
    """
    n = len(tokens)
    if num_draft_tokens < 1 or n <= min_match:
        return []
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
        return []
    start = int(best[-1]) + 1
    period = n - start
    return [int(tokens[start + i % period]) for i in range(num_draft_tokens)]
