"""Draft trees that grow level by level: dynamic ones, which keep the best nodes of all, or ones of a settled shape.

Source: EAGLE-2 (arXiv 2406.16858, sections 4.1 and 4.2). A node's value is the sum of the draft's log-probabilities on
its path, so a node is never worth more than its parent and the best nodes of all always form a tree. With a fixed shape
(EAGLE-1, arXiv 2401.15077, section 4.1) the draft only says which tokens stand at the shape's nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from gpu_worker.batching import SequenceRows
from gpu_worker.draft_tree import MAX_NODES, DraftTree, tree_of
from gpu_worker.drafting.choice import ChoiceOfDrafts
from gpu_worker.drafting.tree_shape import ProductTree
from gpu_worker.models.heads.base import HeadRows
from gpu_worker.request_state import RequestTable

Expand = Callable[[list[SequenceRows], torch.Tensor], HeadRows]


@dataclass(frozen=True)
class TreeShape:
    """Bounds of a tree besides its budget of nodes."""

    max_depth: int  # levels behind the root
    max_children: int = 8  # of one node, in a dynamic tree
    fixed: ProductTree | None = None  # which says all but the depth; None: dynamic
    least_value: float = -math.inf  # log-probability below which a node is not worth a row of verification

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.max_children == 1 and self.fixed is None

    @property
    def prunes(self) -> bool:
        """Whether some nodes may be worth too little."""
        return self.least_value > -math.inf

    def levels(self, budget: int) -> int:
        """Levels of a tree of at most `budget` nodes."""
        return min(self.max_depth, budget)

    def width(self, budget: int) -> int:
        """Nodes that are expanded per level: all levels' together fit the pages that the budget reserves."""
        return max(1, budget // max(1, self.levels(budget) - 1))


CHAINS = TreeShape(max_depth=MAX_NODES, max_children=1)


@dataclass
class _Node:
    token: int
    parent: int  # index of the node before it; -1: the root
    depth: int  # root 0
    value: float


@dataclass
class _Growing:
    """One request's tree while it grows. Expanded nodes are rows of the head, in order of expansion."""

    slot: int
    length: int  # known tokens; the first draft token has this index
    budget: int
    least_value: float
    fixed: ProductTree | None = None  # of at most `budget` nodes
    nodes: list[_Node] = field(default_factory=list)
    expanded: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of each node, in `fixed`
    beam: list[int] = field(default_factory=list)  # the last level's share of `expanded`
    outputs: torch.Tensor | None = None  # [those that ran, h] what the head gave to recycle

    def path(self, index: int) -> list[int]:
        """Tokens from behind the root to this node."""
        tokens: list[int] = []
        while index >= 0:
            tokens.append(self.nodes[index].token)
            index = self.nodes[index].parent
        return tokens[::-1]

    def add_children(self, parent: int, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Children of a node in order of their log-probabilities; those that are worth too little are left out."""
        base, depth = (0.0, 0) if parent < 0 else (self.nodes[parent].value, self.nodes[parent].depth)
        for rank, place in self._wanted(parent, len(tokens)):
            value = base + log_probs[rank]
            if value > -math.inf and value >= self.least_value:
                self.nodes.append(_Node(tokens[rank], parent, depth + 1, value))
                self.places.append(place)

    def _wanted(self, parent: int, count: int) -> list[tuple[int, int]]:
        """Which of `count` candidates become children of a node, each with its place in the fixed shape."""
        if self.fixed is None:
            return [(rank, -1) for rank in range(count)]
        above = -1 if parent < 0 else self.places[parent]
        places = [place for place, over in enumerate(self.fixed.parents) if over == above]
        return [(rank, place) for place in places if (rank := self.fixed.ranks[place]) < count]

    def choose_beam(self, first: int, width: int) -> None:
        """The best `width` of the nodes from `first` on are expanded next; of a fixed shape those with children."""
        candidates = range(first, len(self.nodes))
        if self.fixed is not None:
            self.beam = [i for i in candidates if self.places[i] in self.fixed.parents]
        else:
            self.beam = sorted(sorted(candidates, key=lambda i: -self.nodes[i].value)[:width])
        self.expanded += self.beam

    def inputs(self, root: torch.Tensor) -> torch.Tensor:
        """[expanded, h]: the state before each expanded node, its parent's output or `root` [h]."""
        if self.outputs is None:
            return root.expand(len(self.expanded), -1)
        place = {node: i for i, node in enumerate(self.expanded)} | {-1: len(self.outputs)}
        index = [place[self.nodes[node].parent] for node in self.expanded]
        return torch.cat([self.outputs, root[None]])[torch.tensor(index, device=root.device)]

    def rows(self) -> SequenceRows:
        """All expanded nodes as rows of the head, each seeing its own ancestors."""
        place = {node: i for i, node in enumerate(self.expanded)}
        mask = torch.zeros(len(self.expanded), len(self.expanded), dtype=torch.bool)
        for i, node in enumerate(self.expanded):
            while node >= 0:
                mask[i, place[node]] = True
                node = self.nodes[node].parent
        tokens = tuple(self.nodes[node].token for node in self.expanded)
        # a token at depth d behind the root is the sequence's token number length + d - 1
        positions = tuple(self.length + self.nodes[node].depth - 1 for node in self.expanded)
        return SequenceRows(self.slot, self.length, 0, tokens, positions, mask)

    def best(self) -> list[_Node]:
        """The best `budget` nodes with parents renumbered, parents first."""
        values, depths = [node.value for node in self.nodes], [node.depth for node in self.nodes]
        chosen = sorted(best_first(values, depths, self.budget))  # levels were appended in order of depth
        place = {node: i for i, node in enumerate(chosen)} | {-1: -1}
        return [
            _Node(node.token, place[node.parent], node.depth, node.value)
            for node in (self.nodes[i] for i in chosen)
        ]


def grow_trees(
    table: RequestTable,
    slots: Sequence[int],
    budgets: Sequence[int],
    shape: TreeShape,
    state: HeadRows,
    expand: Expand,
    choice: ChoiceOfDrafts,
) -> DraftTree:
    """One tree per slot with at most budgets[r] nodes behind its root (0: the root alone).

    state [R, h]: the head's outputs at each root. expand(rows, recycled) runs the head. Every level runs the nodes
    expanded before it once more: they are few, weights are read once whatever their number, and so no KV of a
    half-grown tree must be told from that of a neighbour branch.
    """
    growing = [
        _Growing(
            slot,
            int(table.num_tokens[slot]),
            budget,
            shape.least_value,
            None if shape.fixed is None else shape.fixed.best(budget, shape.max_depth),
        )
        for slot, budget in zip(slots, budgets, strict=True)
    ]
    live = [r for r, tree in enumerate(growing) if tree.budget > 0]
    if live:
        index = torch.tensor(live, device=state.normed.device)
        roots: list[list[int]] = [[] for _ in live]
        _add_level(growing, live, [[-1]] * len(live), state.normed[index], roots, shape, choice)
    for level in range(1, shape.max_depth):
        live = [r for r in live if growing[r].beam and level < shape.levels(growing[r].budget)]
        if not live:
            break
        _expand_level(growing, live, state, shape, expand, choice)
    kept = [tree.best() for tree in growing]
    return tree_of(
        [int(table.known(slot)[-1]) for slot in slots],
        [[node.token for node in nodes] for nodes in kept],
        [[node.parent for node in nodes] for nodes in kept],
        table.device,
        [confidences([node.parent for node in nodes], [node.value for node in nodes]) for nodes in kept],
    )


def best_first(values: Sequence[float], depths: Sequence[int], budget: int) -> list[int]:
    """Indices of the best `budget` nodes, best first, equals by depth; a tree where none outdoes its parent."""
    return sorted(range(len(values)), key=lambda i: (-values[i], depths[i], i))[:budget]


def confidences(parents: Sequence[int], values: Sequence[float]) -> list[float]:
    """The draft's own probability of each node behind its parent, from the nodes' values."""
    above = [0.0 if parent < 0 else values[parent] for parent in parents]
    return [math.exp(min(0.0, value - before)) for value, before in zip(values, above, strict=True)]


def _expand_level(
    growing: list[_Growing],
    live: list[int],
    state: HeadRows,
    shape: TreeShape,
    expand: Expand,
    choice: ChoiceOfDrafts,
) -> None:
    """Runs the head over each live tree's expanded nodes and adds the children of its beam."""
    trees = [growing[r] for r in live]
    inputs = torch.cat([tree.inputs(state.recycled[r]) for r, tree in zip(live, trees, strict=True)])
    result = expand([tree.rows() for tree in trees], inputs)
    parents = [tree.beam for tree in trees]
    wanted: list[int] = []
    start = 0
    for tree in trees:
        stop = start + len(tree.expanded)
        tree.outputs = result.recycled[start:stop]
        wanted += range(stop - len(tree.beam), stop)
        start = stop
    normed = result.normed[torch.tensor(wanted, device=result.normed.device)]
    paths = [tree.path(node) for tree in trees for node in tree.beam]
    _add_level(growing, live, parents, normed, paths, shape, choice)


def _add_level(
    growing: list[_Growing],
    live: list[int],
    parents: list[list[int]],
    normed: torch.Tensor,
    paths: list[list[int]],
    shape: TreeShape,
    choice: ChoiceOfDrafts,
) -> None:
    """Children of every parent (rows of `normed`, request by request) and each request's next beam."""
    owners = [r for r, nodes in zip(live, parents, strict=True) for _ in nodes]
    slots = [growing[r].slot for r in owners]
    positions = [growing[r].length + len(path) for r, path in zip(owners, paths, strict=True)]
    tokens, log_probs = choice.children(normed, slots, positions, paths, _num_candidates(growing, shape))
    row = 0
    for r, nodes in zip(live, parents, strict=True):
        tree = growing[r]
        first = len(tree.nodes)
        for parent in nodes:
            tree.add_children(parent, tokens[row], log_probs[row])
            row += 1
        tree.choose_beam(first, shape.width(tree.budget))


def _num_candidates(growing: list[_Growing], shape: TreeShape) -> int:
    """Candidates to rank behind each parent; a fixed shape may want a low rank without those above it."""
    if shape.fixed is None:
        return min(shape.max_children, max(tree.budget for tree in growing))
    return max([1, *(width for tree in growing if tree.fixed is not None for width in tree.fixed.widths)])
