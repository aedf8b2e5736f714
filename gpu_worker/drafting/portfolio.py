"""Several drafting methods at once: their trees merged into one per request, the budget going to what succeeds.

Every part keeps its own state complete (the runner lets it follow the sequence like any drafter); this one only asks
the parts, chooses among their nodes and learns from what the target emitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from gpu_worker.draft_tree import DraftTree, tree_of
from gpu_worker.drafting.base import Drafter, DraftRequest, TargetHidden, TargetProgress
from gpu_worker.drafting.part_choice import PartChoice
from gpu_worker.drafting.success import SuccessRates
from gpu_worker.drafting.trie import ROOT, DraftTrie, Grade
from gpu_worker.request_state import RequestTable
from shared_mem.enums import SpeculationMethod
from shared_mem.records import Admission


@dataclass(frozen=True)
class _Proposal:
    """All nodes that the parts proposed in a slot's last round, chosen for verification or not."""

    length: int  # known tokens when it was made
    trie: DraftTrie
    asked: int  # bit mask of the parts that were asked, whether they had something to propose or not


@dataclass(frozen=True)
class _Segment:
    """One request's share of a tree, on the host."""

    tokens: list[int]  # behind the root
    parents: list[int]  # index among them, or ROOT
    laws: torch.Tensor | None  # [nodes, V], where the drafts were drawn
    confidences: list[float] | None = None  # see Grade


class PortfolioDrafter:
    """Merges the proposals of its parts; best-first by each part's measured success at each depth.

    A part is asked for a request as long as its first node is worth a row and its drafts are worth their time
    (PartChoice). In every probe_interval-th round, and in as many first ones, all are asked, so that each can come
    back. All that a part proposes is judged by the tokens that came, also what was not chosen.

    Under the rejection rule drafts are drawn, and choosing among drawn tokens by what they are would bias the output:
    there the part that has been the most successful drafts alone.
    """

    method = SpeculationMethod.PORTFOLIO
    keeps_state = True
    hidden_layers = None

    def __init__(
        self,
        parts: Mapping[SpeculationMethod, Drafter],
        table: RequestTable,
        least_probability: float = 0.05,
        probe_interval: int = 32,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """least_probability: chance of being accepted from which on a node is worth a row of verification."""
        assert parts, "the configuration names the parts"
        self._methods = tuple(parts)
        self._parts = tuple(parts.values())
        self._table = table
        self._least_probability = least_probability
        self._probe_interval = probe_interval
        self._clock = clock
        num_slots, num_parts = table.num_slots, len(parts)
        self._rates = SuccessRates(num_slots, num_parts)
        self._choice = PartChoice(num_slots, num_parts)
        self._proposals: list[_Proposal | None] = [None] * num_slots
        self._num_rounds = 0
        self._proposed_at: float | None = None  # the end of this step's drafting, by the clock
        # A part that proposes siblings gets the whole budget, for others more tokens than are likely to be reached
        # would be drafted in vain.
        self._branches = [False] * num_parts
        self.num_accepted: dict[SpeculationMethod, int] = dict.fromkeys(parts, 0)

    def admit(self, admission: Admission) -> None:
        """See Drafter.admit."""
        self._rates.admit(admission.slot)
        self._choice.admit(admission.slot)
        self._proposals[admission.slot] = None

    def release(self, slot: int) -> None:
        """See Drafter.release."""
        self._proposals[slot] = None

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTree:
        """See Drafter.propose."""
        tries = [DraftTrie() for _ in requests]
        proposed: list[dict[int, _Segment]] = [{} for _ in requests]  # by part
        asked = self._ask(requests)
        for part, drafter in enumerate(self._parts):
            wanted = [i for i, mask in enumerate(asked) if mask >> part & 1]
            if not wanted:
                continue
            begin = self._clock()
            tree = drafter.propose([self._with_budget(requests[i], part) for i in wanted])
            self._choice.record_time(part, self._clock() - begin)
            for i, segment in zip(wanted, _segments(tree), strict=True):
                self._branches[part] |= len(set(segment.parents)) < len(segment.parents)
                if segment.tokens:
                    tries[i].add(part, segment.tokens, segment.parents, segment.confidences)
                    proposed[i][part] = segment
        chosen = [self._choose(*of) for of in zip(requests, tries, proposed, strict=True)]
        for request, trie, mask in zip(requests, tries, asked, strict=True):
            length = int(self._table.num_tokens[request.slot])
            self._proposals[request.slot] = _Proposal(length, trie, mask) if mask else None
        self._proposed_at = self._clock()
        roots = [int(self._table.known(request.slot)[-1]) for request in requests]
        tree = tree_of(
            roots,
            [segment.tokens for segment in chosen],
            [segment.parents for segment in chosen],
            self._table.device,
        )
        return tree.with_laws([[] if segment.laws is None else list(segment.laws) for segment in chosen])

    def prefill(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """Nothing to compute: the parts follow the sequence themselves."""

    def catch_up(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """Learns from the tokens that came, where the last round was this drafter's."""
        if self._proposed_at is not None:
            self._choice.record_rest(self._clock() - self._proposed_at)
            self._proposed_at = None
        for p in progress:
            proposal, self._proposals[p.slot] = self._proposals[p.slot], None
            if proposal is None or proposal.length != p.num_known - p.num_accepted - 1:
                continue
            emitted = self._table.known(p.slot)[proposal.length : p.num_known].tolist()
            for seen in proposal.trie.judge(emitted):
                self._rates.record(p.slot, *seen)
            proposers = proposal.trie.proposers_on_path(emitted)
            self._choice.record(p.slot, proposal.asked, proposers)
            for mask in proposers[: p.num_accepted]:
                for part, method in enumerate(self._methods):
                    self.num_accepted[method] += mask >> part & 1

    def num_computed_after(self, progress: TargetProgress) -> int:
        """Always 0: it has no draft KV of its own."""
        return 0

    def _ask(self, requests: Sequence[DraftRequest]) -> list[int]:
        """For each request the parts that are to draft for it, as a bit mask."""
        self._num_rounds += 1
        if self._num_rounds <= self._probe_interval or self._num_rounds % self._probe_interval == 0:
            return [self._choice.everyone if request.num_draft_tokens > 0 else 0 for request in requests]
        asked: list[int] = []
        for request in requests:
            mask = self._choice.best(request.slot) if request.num_draft_tokens > 0 else 0
            for part in range(len(self._parts)):
                if not self._rates.reach(request.slot, part, self._least_probability):
                    mask &= ~(1 << part)
            asked.append(mask)
        return asked

    def _with_budget(self, request: DraftRequest, part: int) -> DraftRequest:
        """What a part is asked for: tokens that are likely to be reached, unless it spreads them over siblings."""
        if self._branches[part]:
            return request
        reach = self._rates.reach(request.slot, part, self._least_probability)
        return DraftRequest(request.slot, min(request.num_draft_tokens, reach or 1))

    def _choose(self, request: DraftRequest, trie: DraftTrie, proposed: Mapping[int, _Segment]) -> _Segment:
        """What of all proposals for one request is verified."""
        rate = partial(self._rates.rate, request.slot)
        if any(segment.laws is not None for segment in proposed.values()):
            # by what was measured before this round, never by the tokens just drawn
            return proposed[max(proposed, key=lambda part: rate(part, 1, Grade(0)))]
        nodes = trie.best(request.num_draft_tokens, rate, self._least_probability)
        place = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
        return _Segment([trie.tokens[i] for i in nodes], [place[trie.parents[i]] for i in nodes], None)


def _segments(tree: DraftTree) -> list[_Segment]:
    """Each request's nodes behind its root, moved to the host once."""
    tokens, parents, indptr = tree.host.tokens, tree.host.parents, tree.host.indptr
    sampled = None if tree.q is None else tree.q.any(dim=1).tolist()
    segments: list[_Segment] = []
    for start, stop in pairwise(indptr):
        laws = None
        if tree.q is not None and sampled is not None and any(sampled[start + 1 : stop]):
            laws = tree.q[start + 1 : stop]
        own_parents = [
            ROOT if parent == start else parent - start - 1 for parent in parents[start + 1 : stop]
        ]
        confidences = None if tree.confidences is None else tree.confidences[start + 1 : stop].tolist()
        segments.append(_Segment(tokens[start + 1 : stop], own_parents, laws, confidences))
    return segments
