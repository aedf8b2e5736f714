"""Random attention batches over a paged pool whose unused slots are NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.forward_batch import AttentionMetadata


@dataclass(frozen=True)
class RequestShape:
    """`rows` query rows behind `prefix` keys; with `tree` the rows form a random tree, else a causal run."""

    prefix: int
    rows: int
    tree: bool = False


@dataclass(frozen=True)
class Batch:
    metadata: AttentionMetadata
    query: torch.Tensor  # [T, Hq, D]
    keys: torch.Tensor  # [slots, Hkv, D]
    values: torch.Tensor


def random_tree_mask(rows: int, rng: np.random.Generator) -> torch.Tensor:
    """[rows, rows] bool, ancestor-or-self of a random tree rooted at row 0."""
    mask = torch.eye(rows, dtype=torch.bool)
    for node in range(1, rows):
        mask[node] |= mask[int(rng.integers(node))]
    return mask


def random_batch(
    shapes: list[RequestShape],
    *,
    page_size: int = 4,
    num_kv_heads: int = 2,
    repeats: int = 3,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    consecutive_pages: bool = False,
) -> Batch:
    """Pages in random order (or consecutive), with more pages than are used; every slot not in use is NaN."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    pages_needed = [-(-(s.prefix + s.rows) // page_size) for s in shapes]
    num_pages = sum(pages_needed) + 3
    order = np.arange(num_pages) if consecutive_pages else rng.permutation(num_pages)
    page_indptr = np.cumsum([0, *pages_needed]).astype(np.int32)
    page_indices = order[: page_indptr[-1]].astype(np.int32)
    kv_lens = np.array([s.prefix + s.rows for s in shapes], dtype=np.int32)
    pools = []
    for _ in range(2):
        pool = torch.full((num_pages * page_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
        for b, length in enumerate(kv_lens.tolist()):
            pages = page_indices[page_indptr[b] : page_indptr[b + 1]]
            slots = (pages[:, None] * page_size + np.arange(page_size)).ravel()[:length]
            pool[slots] = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
        pools.append(pool)
    qo_indptr = np.cumsum([0, *(s.rows for s in shapes)]).astype(np.int32)
    metadata = AttentionMetadata(
        page_size=page_size,
        qo_indptr=qo_indptr,
        kv_lens=kv_lens,
        page_indptr=page_indptr,
        page_indices=page_indices,
        tree_masks=tuple(random_tree_mask(s.rows, rng) if s.tree else None for s in shapes),
    )
    query = torch.randn(int(qo_indptr[-1]), num_kv_heads * repeats, head_dim, generator=generator).to(dtype)
    return Batch(metadata, query, pools[0], pools[1])
