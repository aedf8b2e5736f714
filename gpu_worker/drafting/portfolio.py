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
from gpu_worker.drafting.trie import ROOT, DraftTrie
from gpu_worker.request_state import RequestTable
from shared_mem.enums import AcceptanceRule, SpeculationMethod
from shared_mem.records import Admission

_DRAWING_RULES = (AcceptanceRule.REJECTION, AcceptanceRule.BLOCK)


@dataclass(frozen=True)
class _Proposal:
    """All nodes that the parts proposed in a slot's last round, chosen for verification or not."""

    length: int  # known tokens when it was made
    num_draft_tokens: int  # how many could be verified at most
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

    Under the rejection and the block rule drafts are drawn, and choosing among drawn tokens by what they are would bias
    the output: there the part whose drafts have been worth the most drafts alone.
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
        self._waits_for_device = table.device.type != "cpu"
        self._rates = SuccessRates(num_slots, num_parts)
        self._choice = PartChoice(num_slots, num_parts)
        self._proposals: list[_Proposal | None] = [None] * num_slots
        self._draws = [False] * num_slots  # drafts are drawn from a law, so that one part has to draft alone
        self._num_rounds = 0
        self._has_prefill = False  # this step
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
        sampling = admission.sampling
        self._draws[admission.slot] = sampling.temperature > 0 and sampling.acceptance_rule in _DRAWING_RULES

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
            begin = self._now()
            segments = _segments(drafter.propose([self._with_budget(requests[i], part) for i in wanted]))
            self._choice.record_time(part, self._clock() - begin)  # on the host by now, so the device is done
            for i, segment in zip(wanted, segments, strict=True):
                self._branches[part] |= len(set(segment.parents)) < len(segment.parents)
                if segment.tokens:
                    tries[i].add(part, segment.tokens, segment.parents, segment.confidences)
                    proposed[i][part] = segment
        chosen = [self._choose(*of) for of in zip(requests, tries, proposed, strict=True)]
        for request, trie, mask in zip(requests, tries, asked, strict=True):
            length = int(self._table.num_tokens[request.slot])
            proposal = _Proposal(length, request.num_draft_tokens, trie, mask)
            self._proposals[request.slot] = proposal if mask else None
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
        """Nothing to compute: the parts follow the sequence themselves. Such a step's time is not a decode step's."""
        self._has_prefill = True

    def catch_up(self, progress: Sequence[TargetProgress], hidden: TargetHidden) -> None:
        """Learns from the tokens that came, where the last round was this drafter's."""
        if self._proposed_at is not None and not self._has_prefill:
            self._choice.record_rest(self._clock() - self._proposed_at)
        self._proposed_at, self._has_prefill = None, False
        for p in progress:
            proposal, self._proposals[p.slot] = self._proposals[p.slot], None
            if proposal is None or proposal.length != p.num_known - p.num_accepted - 1:
                continue
            emitted = self._table.known(p.slot)[proposal.length : p.num_known].tolist()
            proposers = proposal.trie.proposers_on_path(emitted)
            self._choice.record(
                p.slot, proposal.asked, proposers[: self._num_creditable(p.slot, proposal, emitted)]
            )
            for seen in proposal.trie.judge(emitted):
                self._rates.record(p.slot, *seen)
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
        return [
            self._choice.best(request.slot, self._promising(request.slot), alone=self._draws[request.slot])
            if request.num_draft_tokens > 0
            else 0
            for request in requests
        ]

    def _promising(self, slot: int) -> int:
        """The parts whose first node is worth a row, as a bit mask."""
        reaches = (self._rates.reach(slot, part, self._least_probability) for part in range(len(self._parts)))
        return sum(1 << part for part, reach in enumerate(reaches) if reach)

    def _num_creditable(self, slot: int, proposal: _Proposal, emitted: Sequence[int]) -> int:
        """How many of the tokens that came could have been verified if proposed: drafts count no further."""
        if self._draws[slot]:
            return proposal.num_draft_tokens
        rate = partial(self._rates.rate, slot)
        num_worth = proposal.trie.num_worth_verifying(emitted, rate, self._least_probability)
        return min(num_worth, proposal.num_draft_tokens)

    def _now(self) -> float:
        """The time, once the device has done what was launched before."""
        if self._waits_for_device:
            torch.accelerator.synchronize()
        return self._clock()

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
            best = self._choice.best(request.slot, sum(1 << part for part in proposed), alone=True)
            return proposed[best.bit_length() - 1]
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
