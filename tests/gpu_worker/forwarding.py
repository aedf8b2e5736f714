"""Runs a model over a prompt the way the model runner does: paged KV, one or several forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.forward_batch import AttentionMetadata, ForwardBatch
from gpu_worker.kv_pool import KVPool
from gpu_worker.models.base import CausalLM

PAGE_SIZE = 4


def make_pool(model: CausalLM, num_pages: int) -> KVPool:
    """A pool for `model` with pages of PAGE_SIZE tokens."""
    config = model.config
    return KVPool(
        model.num_layers,
        num_pages,
        PAGE_SIZE,
        config.num_kv_heads,
        config.head_dim,
        model.dtype,
        model.device,
    )


def make_batch(ids: Sequence[int], start: int, pages: Sequence[int]) -> ForwardBatch:
    """Rows of one request: `ids` at positions start, start + 1, ..., in the request's `pages`."""
    end = start + len(ids)
    positions = torch.arange(start, end)
    pages_used = np.asarray(pages[: -(-end // PAGE_SIZE)], dtype=np.int32)
    slots = torch.from_numpy(pages_used.astype(np.int64))[positions // PAGE_SIZE] * PAGE_SIZE
    metadata = AttentionMetadata(
        page_size=PAGE_SIZE,
        qo_indptr=np.array([0, len(ids)], np.int32),
        kv_lens=np.array([end], np.int32),
        page_indptr=np.array([0, len(pages_used)], np.int32),
        page_indices=pages_used,
        tree_masks=(None,),
    )
    return ForwardBatch(torch.tensor(ids), positions, slots + positions % PAGE_SIZE, metadata)


def prompt_logits(
    model: CausalLM,
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    attention: AttentionBackend | None = None,
) -> torch.Tensor:
    """Logits [len(ids), vocab_size]; forward passes end at each of `cuts`. Pages lie out of order."""
    num_pages = -(-len(ids) // PAGE_SIZE) + 1
    pages = list(range(num_pages))[::-1]
    pool = make_pool(model, num_pages)
    backend = attention or ReferenceAttention()
    rows = [
        model.forward(make_batch(ids[begin:end], begin, pages), pool, backend)
        for begin, end in pairwise((0, *cuts, len(ids)))
    ]
    return model.compute_logits(torch.cat(rows))
