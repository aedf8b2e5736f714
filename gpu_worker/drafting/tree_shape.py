"""The shape of a tree that is settled before any draft: which candidates of which depth, from measured hit rates.

Medusa's heads give candidates for every depth at once, EAGLE-1 those of one depth after the other; which of them are
considered follows from how often the candidate of each rank turned out right at each depth. EAGLE-1 verifies the
shape's first nodes, Medusa those that its heads are surest of. Source: sparse trees of Medusa (Cai et al., arXiv
2401.10774, section 2.3.3).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Where a checkpoint comes without measured hit rates: geometric in depth and rank, which gives a sparse tree.
_ASSUMED_FIRST, _ASSUMED_DECAY, _ASSUMED_RANKS = 0.5, 0.6, 8


@dataclass(frozen=True)
class ProductTree:
    """Nodes behind the root, the most probable first: so the first n of them are the best tree of n nodes too."""

    ranks: tuple[int, ...]  # which candidate of its parent a node is, 0 the best
    parents: tuple[int, ...]  # index of a node before it; -1: the root
    depths: tuple[int, ...]  # 1 behind the root
    probabilities: tuple[float, ...]  # that the whole path down to the node is accepted

    @property
    def num_nodes(self) -> int:
        """Nodes without the root."""
        return len(self.ranks)

    @property
    def expected_accepted(self) -> float:
        """Draft tokens accepted per step on average, if the hit rates hold and depths are independent."""
        return math.fsum(self.probabilities)

    @property
    def widths(self) -> tuple[int, ...]:
        """Candidates needed at each depth: one more than the greatest rank in use there."""
        widths = [0] * max(self.depths, default=0)
        for rank, depth in zip(self.ranks, self.depths, strict=True):
            widths[depth - 1] = max(widths[depth - 1], rank + 1)
        return tuple(widths)

    def paths(self) -> list[tuple[int, ...]]:
        """Per node the ranks from behind the root down to it, the form that Medusa's code calls choices."""
        paths: list[tuple[int, ...]] = []
        for rank, parent in zip(self.ranks, self.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), rank))
        return paths

    def best(self, num_nodes: int, max_depth: int | None = None) -> ProductTree:
        """The best tree of at most num_nodes nodes (and of at most max_depth levels) that this one contains."""
        kept = [i for i, depth in enumerate(self.depths) if max_depth is None or depth <= max_depth]
        kept = kept[: max(num_nodes, 0)]
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return ProductTree(
            tuple(self.ranks[i] for i in kept),
            tuple(place[self.parents[i]] for i in kept),
            tuple(self.depths[i] for i in kept),
            tuple(self.probabilities[i] for i in kept),
        )


def with_best_chain(tree: ProductTree, hit_rates: Sequence[Sequence[float]]) -> ProductTree:
    """The tree and behind its nodes, where it ends earlier, the chain of the first candidates of all depths."""
    ranks, parents = list(tree.ranks), list(tree.parents)
    depths, probabilities = list(tree.depths), list(tree.probabilities)
    nodes = {path: node for node, path in enumerate(tree.paths())}
    above, reached = -1, 1.0
    for depth, rates in enumerate(hit_rates, start=1):
        reached *= rates[0]
        node = nodes.get((0,) * depth, len(ranks))
        if node == len(ranks):
            ranks.append(0)
            parents.append(above)
            depths.append(depth)
            probabilities.append(reached)
        above = node
    return ProductTree(tuple(ranks), tuple(parents), tuple(depths), tuple(probabilities))


def build_product_tree(hit_rates: Sequence[Sequence[float]], num_nodes: int) -> ProductTree:
    """The tree of at most num_nodes nodes behind the root with the most accepted tokens expected.

    hit_rates[d][r]: how often the candidate of rank r at depth d + 1 is the token that comes, given that its parent was
    right; at most 1 in sum per depth. A node is worth the product along its path, which never grows downwards: taking
    the best reachable node again and again therefore gives the optimal tree of every size. Candidates that never hit
    get no node, so the tree may be smaller. Raises ValueError naming depth, rank and value of a rate that is none.
    """
    orders = [_ranks_by_rate(rates, depth) for depth, rates in enumerate(hit_rates, start=1)]
    ranks: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    probabilities: list[float] = []
    # (-value, depth, tie, parent's value, parent, place in the order of its depth): siblings enter one by one
    heap: list[tuple[float, int, int, float, int, int]] = []
    ties = itertools.count()

    def reach(parent: int, parent_value: float, depth: int, place: int) -> None:
        if depth <= len(orders) and place < len(orders[depth - 1]):
            rate = hit_rates[depth - 1][orders[depth - 1][place]]
            if rate > 0:
                entry = (-parent_value * rate, depth, next(ties), parent_value, parent, place)
                heapq.heappush(heap, entry)

    reach(-1, 1.0, 1, 0)
    while heap and len(ranks) < num_nodes:
        negative, depth, _, parent_value, parent, place = heapq.heappop(heap)
        node = len(ranks)
        ranks.append(orders[depth - 1][place])
        parents.append(parent)
        depths.append(depth)
        probabilities.append(-negative)
        reach(parent, parent_value, depth, place + 1)
        reach(node, -negative, depth + 1, 0)
    return ProductTree(tuple(ranks), tuple(parents), tuple(depths), tuple(probabilities))


def measure_hit_rates(ranks: npt.NDArray[np.int64], num_ranks: int) -> list[list[float]]:
    """hit_rates for build_product_tree from what was seen.

    ranks [N, D]: at each of N places the rank of the true token among the candidates of depth 1..D; num_ranks or more
    where it was not among them; negative where the depth does not count (behind a wrong parent, or past the end).
    """
    rates: list[list[float]] = []
    for column in ranks.T:
        counted = column[column >= 0]
        hits = np.bincount(counted[counted < num_ranks], minlength=num_ranks)
        rates.append((hits / max(len(counted), 1)).tolist())
    return rates


def assumed_hit_rates(num_depths: int) -> tuple[tuple[float, ...], ...]:
    """Rates for heads that were never measured: halving over ranks, falling over depths."""
    return tuple(
        tuple(_ASSUMED_FIRST * _ASSUMED_DECAY**depth * 0.5**rank for rank in range(_ASSUMED_RANKS))
        for depth in range(num_depths)
    )


def _ranks_by_rate(rates: Sequence[float], depth: int) -> list[int]:
    """Ranks of one depth, the most frequent hit first (of equal ones the lower rank)."""
    for rank, rate in enumerate(rates):
        if not 0.0 <= rate <= 1.0:  # NaN is neither
            raise ValueError(f"hit_rates: depth {depth}, rank {rank} is {rate}, must be within 0..1")
    if (total := math.fsum(rates)) > 1.0 + 1e-6:
        raise ValueError(
            f"hit_rates: depth {depth} sums to {total}, candidates exclude each other: at most 1"
        )
    return sorted(range(len(rates)), key=lambda rank: (-rates[rank], rank))
