"""A DraftTree on the host, as acceptance rules walk it: children by rank, nodes by request."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gpu_worker.draft_tree import DraftTree, HostNodes
from gpu_worker.sampling.slot_states import Int64Array


def longest_paths(nodes: HostNodes, drawn: list[int]) -> list[list[int]]:
    """Per request the nodes from its root on, as long as the token drawn at a node is one of its children's.

    drawn [N]: the target's token at every node. The same as acceptance.follow_drawn, for all requests of a greedy step.
    """
    paths: list[list[int]] = []
    for begin, end in pairwise(nodes.indptr):
        path, node = [begin], begin
        for child in range(begin + 1, end):  # children come behind their parents
            if nodes.parents[child] == node and nodes.tokens[child] == drawn[node]:
                path.append(child)
                node = child
        paths.append(path)
    return paths


@dataclass(frozen=True)
class HostTree:
    """Numpy view of a DraftTree: N nodes of R requests, node indices as there."""

    roots: Int64Array  # [R]
    owner: Int64Array  # [N] request of each node
    tokens: Int64Array  # [N]
    parents: Int64Array  # [N]
    depths: Int64Array  # [N]
    children: (
        Int64Array  # [N, C] in node order (for sampled siblings: the order they were drawn in); -1: none
    )

    @classmethod
    def of(cls, tree: DraftTree) -> HostTree:
        indptr = tree.indptr.astype(np.int64)
        parents = tree.parents.cpu().numpy()
        owner = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        nodes = np.flatnonzero(parents != np.arange(len(parents)))
        nodes = nodes[np.argsort(parents[nodes], kind="stable")]
        of = parents[nodes]
        starts = np.flatnonzero(np.r_[True, of[1:] != of[:-1]]) if len(of) else np.zeros(0, dtype=np.int64)
        rank = np.arange(len(of)) - np.repeat(starts, np.diff(np.r_[starts, len(of)]))
        children = np.full((len(parents), int(rank.max()) + 1 if len(rank) else 0), -1, dtype=np.int64)
        children[of, rank] = nodes
        return cls(
            roots=indptr[:-1],
            owner=owner,
            tokens=tree.tokens.cpu().numpy(),
            parents=parents,
            depths=tree.depths.cpu().numpy(),
            children=children,
        )

    def are_chains(self, requests: Int64Array) -> npt.NDArray[np.bool_]:
        """[r] whether the tree of each of `requests` is a chain: node k lies k deep."""
        offsets = np.arange(len(self.owner)) - self.roots[self.owner]
        branching = np.zeros(len(self.roots), dtype=np.bool_)
        branching[self.owner[self.depths != offsets]] = True
        return ~branching[requests]

    def paths(self, last_nodes: Int64Array) -> list[list[int]]:
        """For each of last_nodes [r], the nodes from its root to it, both included."""
        lengths = self.depths[last_nodes] + 1
        nodes = np.zeros((len(last_nodes), int(lengths.max(initial=0))), dtype=np.int64)
        current = last_nodes
        for _ in range(nodes.shape[1]):
            nodes[np.arange(len(nodes)), self.depths[current]] = current
            current = self.parents[current]  # a root is its own parent
        return [row[:length] for row, length in zip(nodes.tolist(), lengths.tolist(), strict=True)]

    def drafts_on_path(self, node: int) -> list[int]:
        """Tokens of the path's nodes behind the root, `node`'s own included."""
        drafts: list[int] = self.tokens[self.paths(np.array([node]))[0][1:]].tolist()
        return drafts
