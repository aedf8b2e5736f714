"""Host side of an attention plan: which requests with few rows are padded to one shape, and their indices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.forward_batch import AttentionMetadata

# A group's gathered keys stay in the cache between the gather and the two products that read them.
MAX_GROUP_KEYS = 4096
# Padding may cost a quarter of what is needed, plus what is too little to be worth another group.
MAX_PADDING_RATIO = 0.25
FREE_PADDING_KEYS = 256


@dataclass(frozen=True)
class KeyBlock:
    """K keys of each of G requests, aligned at the right; padding repeats the request's own first key."""

    slots: npt.NDArray[np.int64]  # [G, K] token slots of the pool
    padding_bias: torch.Tensor | None  # [G, 1, K] float32 of 0 and -inf; None: no padding
    row_bias: torch.Tensor | None  # [G or 1, Q, Q] float32, for the last Q columns alone; None: all visible


@dataclass(frozen=True)
class FewRows:
    """G requests of Q rows each, padded on the left by repeating a request's first row.

    One block: a softmax over its keys. Two: the shared prefix of a tree and the tree's own rows, whose
    results are merged. Padding is always finite and the request's own; a padding row may see nothing and is
    dropped.
    """

    rows: npt.NDArray[np.int64]  # [G, Q] rows of the batch
    valid: npt.NDArray[np.bool_]  # [G, Q] False at padding
    blocks: tuple[KeyBlock, ...]


@dataclass(frozen=True, order=True)
class _Shape:
    """Requests of one shape may share a group."""

    row_bucket: int  # 1, 4, 8, 16, ...: padding rows cost little beside the gather
    tree: bool
    prefix: bool  # a tree at the very start has no prefix pass


def group_few_rows(metadata: AttentionMetadata, requests: list[int]) -> list[FewRows]:
    """Groups `requests` by number of rows and length so that padding stays bounded; builds their indices."""
    num_query = np.diff(metadata.qo_indptr)

    def shape(b: int) -> _Shape:
        q = int(num_query[b])
        tree = metadata.tree_masks[b] is not None and q > 1
        bucket = 1 if q == 1 else max(4, 1 << (q - 1).bit_length())
        return _Shape(bucket, tree, not tree or int(metadata.kv_lens[b]) > q)

    def length(b: int) -> int:
        return int(metadata.kv_lens[b]) - (int(num_query[b]) if shape(b).tree else 0)

    groups: list[FewRows] = []
    members: list[int] = []
    needed = 0  # keys of `members` without padding
    for b in sorted(requests, key=lambda b: (shape(b), length(b), b)):
        padded = (len(members) + 1) * length(b)
        bounded = padded <= (needed + length(b)) * (1 + MAX_PADDING_RATIO) + FREE_PADDING_KEYS
        if members and (shape(members[0]) != shape(b) or padded > MAX_GROUP_KEYS or not bounded):
            groups.append(_build(metadata, sorted(members), shape(members[0])))
            members, needed = [], 0
        members.append(b)
        needed += length(b)
    if members:
        groups.append(_build(metadata, sorted(members), shape(members[0])))
    return groups


def _build(metadata: AttentionMetadata, members: list[int], shape: _Shape) -> FewRows:
    num_query = np.diff(metadata.qo_indptr)[members].astype(np.int64)
    kv_lens = metadata.kv_lens[members].astype(np.int64)
    most_rows = int(num_query.max())
    steps = np.arange(most_rows) - (most_rows - num_query[:, None])  # [G, Q], negative at padding
    rows = metadata.qo_indptr[members].astype(np.int64)[:, None] + np.maximum(steps, 0)
    blocks: tuple[KeyBlock, ...]
    if not shape.tree:
        causal = None
        if most_rows > 1:
            hidden = torch.ones(1, most_rows, most_rows, dtype=torch.bool).triu_(1)
            causal = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        blocks = (_block(metadata, members, kv_lens, causal),)
    else:
        num_prefix = kv_lens - num_query
        bias = torch.full((len(members), most_rows, most_rows), -torch.inf)
        for g, b in enumerate(members):
            padding = most_rows - int(num_query[g])
            mask = metadata.tree_masks[b]
            assert mask is not None, "a tree has a mask"
            bias[g, padding:, padding:].masked_fill_(mask, 0.0)
            bias[g, :padding] = 0.0
        own_positions = num_prefix[:, None] + np.maximum(steps, 0)
        own = KeyBlock(_slots(metadata, members, own_positions), None, bias)
        blocks = (_block(metadata, members, num_prefix, None), own) if shape.prefix else (own,)
    return FewRows(rows, steps >= 0, blocks)


def _block(
    metadata: AttentionMetadata,
    members: list[int],
    lengths: npt.NDArray[np.int64],
    row_bias: torch.Tensor | None,
) -> KeyBlock:
    """The first lengths[g] keys of each request."""
    most = int(lengths.max())
    positions = np.arange(most) - (most - lengths[:, None])
    padding_bias = None
    if int(lengths.min()) < most:
        hidden = torch.from_numpy(positions < 0)
        padding_bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, :]
    return KeyBlock(_slots(metadata, members, np.maximum(positions, 0)), padding_bias, row_bias)


def _slots(
    metadata: AttentionMetadata, members: list[int], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """[G, K] pool slots of the token positions [G, K] of each request."""
    pages, offsets = np.divmod(positions, metadata.page_size)
    starts = metadata.page_indptr[members].astype(np.int64)
    page_ids = metadata.page_indices[starts[:, None] + pages].astype(np.int64)
    return page_ids * metadata.page_size + offsets
