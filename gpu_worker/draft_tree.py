"""The one shape of every proposal: what drafters give, what verification and acceptance read. A leaf module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.transfers import to_device

MAX_NODES = 64  # of one tree behind its root, and so candidates of one node: the kernels' top-k gives no more


@dataclass(frozen=True)
class HostShape:
    """A tree without its tokens as plain lists: a step reads a few nodes one by one, which arrays are slow at."""

    indptr: list[int]
    parents: list[int]
    depths: list[int]


@dataclass(frozen=True)
class HostNodes(HostShape):
    """The same with the tokens."""

    tokens: list[int]


@dataclass(frozen=True)
class DeviceNodes:
    """The nodes as tensors, where drafts were chosen on the device and the host has not read them."""

    tokens: torch.Tensor  # [N] int64
    parents: torch.Tensor  # [N] int64
    depths: torch.Tensor  # [N] int64


@dataclass(frozen=True)
class DraftTree:
    """Token trees of R requests, rooted at each request's last known token; N nodes in all.

    Request r owns nodes indptr[r] .. indptr[r + 1] - 1, the first of which is its root: the sequence's last
    token, whose target KV this step computes. Parents come before children. A chain gives every node but the last
    one child; a request without drafts is a tree of one node, so plain decoding is no special case.

    Nodes stay where the drafter had them, on the host or on the device; the other form is made when it is asked for.
    """

    indptr: npt.NDArray[np.int32]  # [R + 1], host: the shapes of a step are known before it runs
    nodes: HostNodes | DeviceNodes
    device: torch.device | str = "cpu"
    # The law each draft token was drawn from, for drafters that sample under the rejection rule;
    # None where all drafts are deterministic. Rows of roots and of deterministic nodes are all zero.
    q: torch.Tensor | None = None  # [N, V] float32
    # How sure the drafter is of each node, given that its parent is right; nothing downstream of a portfolio reads it.
    confidences: npt.NDArray[np.float32] | None = None  # [N], within 0..1, roots 1

    @classmethod
    def of_tensors(
        cls,
        indptr: npt.NDArray[np.int32],
        tokens: torch.Tensor,
        parents: torch.Tensor,
        depths: torch.Tensor,
        q: torch.Tensor | None = None,
    ) -> DraftTree:
        """The tree whose nodes are on the device of `tokens`; see the fields and properties of the same names."""
        return cls(indptr, DeviceNodes(tokens, parents, depths), tokens.device, q)

    @property
    def host_nodes(self) -> HostNodes | None:
        """The nodes if the host has them without a read."""
        return self.nodes if isinstance(self.nodes, HostNodes) else None

    @cached_property
    def tokens(self) -> torch.Tensor:
        """[N] int64 on the device."""
        return self._on_device(self.nodes.tokens)

    @cached_property
    def parents(self) -> torch.Tensor:
        """[N] int64 on the device, node index in 0..N-1; a root is its own parent."""
        return self._on_device(self.nodes.parents)

    @cached_property
    def depths(self) -> torch.Tensor:
        """[N] int64 on the device, root 0."""
        return self._on_device(self.nodes.depths)

    def _on_device(self, values: list[int] | torch.Tensor) -> torch.Tensor:
        return values if isinstance(values, torch.Tensor) else int64_tensor(values, self.device)

    @property
    def num_requests(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_nodes(self) -> int:
        return int(self.indptr[-1])

    @property
    def has_drafts(self) -> bool:
        """False when there are only roots."""
        return self.num_nodes > self.num_requests

    @cached_property
    def drafts_one_at_most(self) -> bool:
        """True if every request is a root alone or a root and its child."""
        return all(end - begin <= 2 for begin, end in pairwise(self.indptr.tolist()))

    @cached_property
    def shape(self) -> HostShape:
        """The nodes on the host but for their tokens; nothing is read back where `indptr` says it all."""
        if isinstance(self.nodes, HostNodes):
            return self.nodes
        indptr = self.indptr.tolist()
        if not self.drafts_one_at_most:
            return HostShape(indptr, self.parents.tolist(), self.depths.tolist())
        parents = [begin for begin, end in pairwise(indptr) for _ in range(begin, end)]
        return HostShape(indptr, parents, [node - parent for node, parent in enumerate(parents)])

    @cached_property
    def host(self) -> HostNodes:
        """The nodes on the host."""
        if isinstance(self.nodes, HostNodes):
            return self.nodes
        shape = self.shape
        return HostNodes(shape.indptr, shape.parents, shape.depths, self.tokens.tolist())

    def ancestors(self) -> torch.Tensor:
        """[N, N] bool on the host: row i is True at i and at every ancestor of node i (same request only)."""
        visible = np.eye(self.num_nodes, dtype=np.bool_)
        for node, parent in enumerate(self.shape.parents):
            visible[node] |= visible[parent]  # its row is complete: parents come first
        return torch.from_numpy(visible)

    def is_chain(self) -> bool:
        """True if no node of any request has two children: depth counts up along each request's nodes."""
        shape = self.shape
        return all(
            shape.depths[begin:end] == list(range(end - begin)) for begin, end in pairwise(shape.indptr)
        )

    def with_laws(self, laws: list[list[torch.Tensor]]) -> DraftTree:
        """The tree with the law [V] that each draft token of request r was drawn from, laws[r] in order of its nodes.

        Requests whose drafts were not drawn have no laws; if none has any, the tree stays as it is.
        """
        example = next((law[0] for law in laws if law), None)
        if example is None:
            return self
        q = torch.zeros((self.num_nodes, example.shape[-1]), dtype=torch.float32, device=example.device)
        for r, law in enumerate(laws):
            if law:
                start = int(self.indptr[r]) + 1
                q[start : start + len(law)] = torch.stack(law)
        return replace(self, q=q)


def int64_tensor(values: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """The values as a tensor; for a few of them several times faster than torch.tensor."""
    return to_device(np.array(values, dtype=np.int64), device)


def tree_of(
    roots: list[int],
    tokens: list[list[int]],
    parents: list[list[int]],
    device: torch.device | str = "cpu",
    confidences: list[list[float]] | None = None,
) -> DraftTree:
    """One tree per request: tokens[r] are the nodes behind its root, parents first; parents[r] index them, -1: root.

    confidences[r]: of the nodes behind its root.
    """
    indptr = [0]
    all_tokens: list[int] = []
    all_parents: list[int] = []
    depths: list[int] = []
    for r, root in enumerate(roots):
        start = len(all_tokens)
        all_tokens += [root, *tokens[r]]
        all_parents += [start, *(start + 1 + parent for parent in parents[r])]
        depths.append(0)
        for parent in parents[r]:
            depths.append(depths[start + 1 + parent] + 1)
        indptr.append(len(all_tokens))
    return DraftTree(
        indptr=np.array(indptr, dtype=np.int32),
        nodes=HostNodes(indptr, all_parents, depths, all_tokens),
        device=device,
        confidences=None if confidences is None else _flattened(confidences),
    )


def _flattened(confidences: list[list[float]]) -> npt.NDArray[np.float32]:
    return np.array([value for of in confidences for value in (1.0, *of)], dtype=np.float32)


def chain_tree(
    roots: list[int],
    drafts: list[list[int]],
    device: torch.device | str = "cpu",
    confidences: list[list[float]] | None = None,
) -> DraftTree:
    """One chain per request: `roots[r]`, then `drafts[r]` (possibly empty)."""
    return tree_of(roots, drafts, [list(range(-1, len(draft) - 1)) for draft in drafts], device, confidences)


def single_drafts_tree(roots: list[int], drafted: Sequence[int], drafts: torch.Tensor) -> DraftTree:
    """Each root with at most one draft: those of the requests `drafted` [d], ascending, are drafts [d] int64.

    The drafts stay where they are.
    """
    indptr = np.arange(len(roots) + 1, dtype=np.int64)
    indptr[1:] += np.searchsorted(drafted, np.arange(len(roots)), side="right")
    starts = np.repeat(indptr[:-1], np.diff(indptr))  # [N] each node's root
    tokens = to_device(np.repeat(np.array(roots, dtype=np.int64), np.diff(indptr)), drafts.device)
    if len(drafted):
        nodes = to_device(indptr[np.array(drafted)] + 1, drafts.device)
        tokens = tokens.index_copy(0, nodes, drafts)
    depths = np.arange(len(starts)) - starts
    return DraftTree.of_tensors(
        indptr.astype(np.int32), tokens, to_device(starts, drafts.device), to_device(depths, drafts.device)
    )


def root_tree(roots: list[int], device: torch.device | str = "cpu") -> DraftTree:
    """R requests without drafts: roots [R] are their last known tokens."""
    indptr = list(range(len(roots) + 1))
    nodes = HostNodes(indptr, indptr[:-1], [0] * len(roots), roots)
    return DraftTree(np.array(indptr, dtype=np.int32), nodes, device)


def merge_trees(trees: list[DraftTree], order: list[tuple[int, int]]) -> DraftTree:
    """One tree of requests picked from several: `order[i]` = (index into trees, request of that tree)."""
    device = trees[0].device
    segments = [(t, int(trees[t].indptr[r]), int(trees[t].indptr[r + 1])) for t, r in order]
    indptr = [0, *accumulate(stop - start for _, start, stop in segments)]
    width = next((tree.q.shape[1] for tree in trees if tree.q is not None), None)
    q = None if width is None else torch.zeros((indptr[-1], width), dtype=torch.float32, device=device)
    for (t, start, stop), begin in zip(segments, indptr, strict=False):
        law = trees[t].q
        if q is not None and law is not None:
            q[begin : begin + stop - start] = law[start:stop]
    on_host = all(tree.host_nodes is not None for tree in trees)
    merged = _merged_on_host if on_host else _merged_on_device
    return DraftTree(np.array(indptr, dtype=np.int32), merged(trees, segments, indptr), device, q)


_Segment = tuple[int, int, int]  # index into trees, first node there, end


def _merged_on_host(trees: list[DraftTree], segments: list[_Segment], indptr: list[int]) -> HostNodes:
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    for (t, start, stop), begin in zip(segments, indptr, strict=False):
        host = trees[t].host
        tokens += host.tokens[start:stop]
        parents += [parent + begin - start for parent in host.parents[start:stop]]
        depths += host.depths[start:stop]
    return HostNodes(indptr, parents, depths, tokens)


def _merged_on_device(trees: list[DraftTree], segments: list[_Segment], indptr: list[int]) -> DeviceNodes:
    tokens: list[torch.Tensor] = []
    parents: list[torch.Tensor] = []
    depths: list[torch.Tensor] = []
    for (t, start, stop), begin in zip(segments, indptr, strict=False):
        tree = trees[t]
        tokens.append(tree.tokens[start:stop])
        parents.append(tree.parents[start:stop] + (begin - start))
        depths.append(tree.depths[start:stop])
    return DeviceNodes(torch.cat(tokens), torch.cat(parents), torch.cat(depths))
