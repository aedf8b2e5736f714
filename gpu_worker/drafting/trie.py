"""Proposals of several drafters for one request, merged at the root by common prefixes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

ROOT = -1


class Grade(NamedTuple):
    """What a part says of a node of its own tree: its rank among its siblings, and how sure it is of it."""

    rank: int  # 0 the best
    confidence: float | None = (
        None  # chance that the node is right, given that its parent is; None: no estimate
    )


# (part, depth behind the root, grade) -> how often such a node is right
SuccessRate = Callable[[int, int, Grade], float]

# (part, depth, grade, whether that node was the token that came), its parent having been right
Judgement = tuple[int, int, Grade, bool]


class DraftTrie:
    """Nodes are counted in order of addition, parents first; each knows which parts proposed it with which grade."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []  # ROOT or an earlier node
        self.depths: list[int] = []  # 1 behind the root
        self.proposers: list[list[tuple[int, Grade]]] = []  # by node: (part, grade)
        self._children: dict[int, dict[int, int]] = {ROOT: {}}  # by parent: token -> node

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self,
        part: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        confidences: Sequence[float] | None = None,
    ) -> None:
        """A part's tree: its nodes behind the root, parents first; parents[i] is an index among them or ROOT.

        Siblings count as the better ranked the earlier they come. confidences: see Grade.
        """
        places: list[int] = []
        num_siblings: dict[int, int] = {}
        for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            above = ROOT if parent == ROOT else places[parent]
            rank = num_siblings.get(above, 0)
            num_siblings[above] = rank + 1
            node = self._children[above].get(token)
            if node is None:
                node = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(above)
                self.depths.append(1 if above == ROOT else self.depths[above] + 1)
                self.proposers.append([])
                self._children[above][token] = node
                self._children[node] = {}
            grade = Grade(rank, None if confidences is None else confidences[i])
            self.proposers[node].append((part, grade))
            places.append(node)

    def best(self, num_nodes: int, success: SuccessRate, least_probability: float) -> list[int]:
        """The most valuable nodes, at most num_nodes, each behind its parent, none worth less than least_probability.

        A node is worth the chance that the whole path down to it is right; parts that agree on a node count as
        independent witnesses of it. No node is worth more than its parent, so taking the best one reachable is optimal.
        """
        chosen: list[int] = []
        heap: list[tuple[float, int]] = []

        def reach(parent: int, value: float) -> None:
            for node in self._children[parent].values():
                worth = value * self._chance(node, success)
                if worth >= least_probability:
                    heapq.heappush(heap, (-worth, node))

        reach(ROOT, 1.0)
        while heap and len(chosen) < num_nodes:
            negative, node = heapq.heappop(heap)
            chosen.append(node)
            reach(node, -negative)
        return chosen

    def judge(self, emitted: Sequence[int]) -> list[Judgement]:
        """What the tokens that came, `emitted`, say of every node whose parent was right, verified or not."""
        judgements: list[Judgement] = []
        at = ROOT
        for depth, token in enumerate(emitted, start=1):
            following = self._children[at]
            judgements += [
                (part, depth, grade, proposed == token)
                for proposed, node in following.items()
                for part, grade in self.proposers[node]
            ]
            if token not in following:
                break
            at = following[token]
        return judgements

    def proposers_on_path(self, emitted: Sequence[int]) -> list[int]:
        """Of each token that came, as long as some part proposed it, the parts that did, as a bit mask."""
        return [sum({1 << part for part, _ in self.proposers[node]}) for node in self._right_nodes(emitted)]

    def num_worth_verifying(
        self, emitted: Sequence[int], success: SuccessRate, least_probability: float
    ) -> int:
        """How many of the tokens that came have a node that is worth at least least_probability, see `best`."""
        value, count = 1.0, 0
        for node in self._right_nodes(emitted):
            value *= self._chance(node, success)
            if value < least_probability:
                break
            count += 1
        return count

    def _chance(self, node: int, success: SuccessRate) -> float:
        """Estimated chance that a node is right, given that its parent is."""
        depth, doubt = self.depths[node], 1.0
        for part, grade in self.proposers[node]:
            doubt *= 1.0 - success(part, depth, grade)
        return 1.0 - doubt

    def _right_nodes(self, emitted: Sequence[int]) -> Iterator[int]:
        """Down from the root, the nodes that are the tokens that came."""
        at = ROOT
        for token in emitted:
            node = self._children[at].get(token)
            if node is None:
                return
            yield node
            at = node
