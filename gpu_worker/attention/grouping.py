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
class FewRows:
    """G requests of Q (padded) rows each, ready to be uploaded.

    Padding repeats slots and rows of the same request, so that it is finite and nobody else's; it is hidden
    by the biases (0 or -inf). `own_slots` is None for decode rows (Q = 1): their own key ends the prefix block.
    """

    rows: npt.NDArray[np.int64]  # [G, Q] rows of the batch
    valid: npt.NDArray[np.bool_]  # [G, Q] False at padding
    prefix_slots: npt.NDArray[np.int64] | None  # [G, P]
    prefix_bias: torch.Tensor | None  # [G, 1, P] float32; None: no padding
    own_slots: npt.NDArray[np.int64] | None  # [G, Q]
    own_bias: torch.Tensor | None  # [G, Q, Q] float32


def group_few_rows(metadata: AttentionMetadata, requests: list[int]) -> list[FewRows]:
    """Groups `requests` by number of rows (1, 2-4, 5-8, 9-16, ...) and length; builds their indices."""
    num_query = np.diff(metadata.qo_indptr)
    num_prefix = np.where(num_query == 1, metadata.kv_lens, metadata.kv_lens - num_query)

    def shape_class(b: int) -> tuple[int, bool]:
        q = int(num_query[b])
        return (1 if q == 1 else max(4, 1 << (q - 1).bit_length())), bool(num_prefix[b] > 0)

    groups: list[FewRows] = []
    order = sorted(requests, key=lambda b: (shape_class(b), int(num_prefix[b]), b))
    members: list[int] = []
    total = 0  # prefix keys of `members` without padding
    for b in order:
        length = int(num_prefix[b])
        padded = (len(members) + 1) * length
        fits = padded <= MAX_GROUP_KEYS
        bounded = padded <= (total + length) * (1 + MAX_PADDING_RATIO) + FREE_PADDING_KEYS
        if members and (shape_class(members[0]) != shape_class(b) or not fits or not bounded):
            groups.append(_build(metadata, sorted(members)))
            members, total = [], 0
        members.append(b)
        total += length
    if members:
        groups.append(_build(metadata, sorted(members)))
    return groups


def _build(metadata: AttentionMetadata, members: list[int]) -> FewRows:
    first_rows = metadata.qo_indptr[members].astype(np.int64)
    num_query = np.diff(metadata.qo_indptr)[members].astype(np.int64)
    kv_lens = metadata.kv_lens[members].astype(np.int64)
    most_rows = int(num_query.max())
    steps = np.minimum(np.arange(most_rows), num_query[:, None] - 1)  # [G, Q] padding repeats the last row
    valid = np.arange(most_rows) < num_query[:, None]
    decode = most_rows == 1
    num_prefix = kv_lens if decode else kv_lens - num_query
    prefix_slots = prefix_bias = own_slots = own_bias = None
    if num_prefix.max() > 0:
        columns = np.arange(int(num_prefix.max()))
        # Padding repeats the request's first key.
        positions = np.where(columns < num_prefix[:, None], columns, 0)
        prefix_slots = _slots(metadata, members, positions)
        if num_prefix.min() < num_prefix.max():
            hidden = torch.from_numpy(columns >= num_prefix[:, None])
            prefix_bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, :]
    if not decode:
        own_slots = _slots(metadata, members, num_prefix[:, None] + steps)
        own_bias = torch.full((len(members), most_rows, most_rows), -torch.inf)
        for g, b in enumerate(members):
            q = int(num_query[g])
            mask = metadata.tree_masks[b]
            seen = torch.ones(q, q, dtype=torch.bool).tril_() if mask is None else mask.cpu()
            own_bias[g, :q, :q].masked_fill_(seen, 0.0)
            own_bias[g, q:] = own_bias[g, q - 1]
    return FewRows(first_rows[:, None] + steps, valid, prefix_slots, prefix_bias, own_slots, own_bias)


def _slots(
    metadata: AttentionMetadata, members: list[int], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """[G, K] pool slots of the token positions [G, K] of each request."""
    pages, offsets = np.divmod(positions, metadata.page_size)
    starts = metadata.page_indptr[members].astype(np.int64)
    page_ids = metadata.page_indices[starts[:, None] + pages].astype(np.int64)
    return page_ids * metadata.page_size + offsets
