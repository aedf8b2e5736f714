"""What a step came to: the accepted nodes and emitted tokens of each request; of single drafts also while unread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.draft_tree import DraftTree, HostShape
from gpu_worker.sampling.slot_states import Int64Array
from gpu_worker.sampling.tree_walk import HostTree, longest_paths
from gpu_worker.transfers import HostCopy, to_device
from shared_mem.records import Logprobs


@dataclass(frozen=True)
class Verification:
    """What a step came to, one entry per request of the tree."""

    num_accepted: list[int]
    path_nodes: list[list[int]]  # global node indices: the root, then the accepted nodes
    token_ids: list[list[int]]  # the accepted drafts, then the target's own token
    logprobs: list[Logprobs | None]  # one row per token of token_ids


@dataclass(frozen=True)
class UnreadVerification:
    """Acceptance of at most one draft per request, on the device, while the host knows nothing of it yet."""

    drawn: torch.Tensor  # [N] int64 the target's token at every node: behind an accepted node it comes next
    num_accepted: torch.Tensor  # [R] int64, 0 or 1
    _shape: HostShape
    _copy: HostCopy  # drawn, then num_accepted

    def read(self) -> Verification:
        """The same on the host; waits for the tokens, not for what was launched since. Without log-probabilities."""
        values = self._copy.read()
        accepted = values[len(self.drawn) :]
        paths = [
            [begin, begin + 1] if accepts else [begin]
            for begin, accepts in zip(self._shape.indptr, accepted, strict=False)
        ]
        # An accepted draft is the token that was drawn before it.
        return Verification(
            accepted, paths, [[values[node] for node in path] for path in paths], [None] * len(paths)
        )


def accept_single_drafts(tree: DraftTree, drawn: torch.Tensor) -> UnreadVerification:
    """Keeps a draft if the token drawn [N] at its root equals it: follow_drawn for trees of one draft at most."""
    assert tree.drafts_one_at_most, "longer drafts are walked on the host"
    roots = tree.indptr[:-1].astype(np.int64)
    drafted = np.flatnonzero(np.diff(tree.indptr) == 2)
    at = to_device(roots[drafted], drawn.device)
    hits = (drawn.index_select(0, at) == tree.tokens.index_select(0, at + 1)).to(torch.int64)
    if len(drafted) < len(roots):
        none = torch.zeros(len(roots), dtype=torch.int64, device=drawn.device)
        hits = none.index_copy_(0, to_device(drafted, drawn.device), hits)
    return UnreadVerification(drawn, hits, tree.shape, HostCopy(torch.cat([drawn, hits])))


def verification_of_drawn(tree: DraftTree, drawn: list[int]) -> Verification:
    """Keeps drafts as long as the token drawn [N] at a node is one of its children; without log-probabilities."""
    if not tree.has_drafts:  # nothing to walk: one token follows each root
        n = tree.num_requests
        return Verification([0] * n, [[root] for root in range(n)], [[token] for token in drawn], [None] * n)
    paths = longest_paths(tree.host, drawn)
    emitted = [[drawn[node] for node in path] for path in paths]  # an accepted draft was drawn at its parent
    return Verification([len(path) - 1 for path in paths], paths, emitted, [None] * len(paths))


def verification_of_paths(tree: HostTree, last_nodes: Int64Array, own_tokens: Int64Array) -> Verification:
    """The paths to last_nodes [R] and the target's own_tokens [R] behind them; without log-probabilities."""
    paths = tree.paths(last_nodes)
    tokens = tree.tokens.tolist()
    emitted = [
        [*(tokens[node] for node in path[1:]), own]
        for path, own in zip(paths, own_tokens.tolist(), strict=True)
    ]
    return Verification([len(path) - 1 for path in paths], paths, emitted, [None] * len(paths))
