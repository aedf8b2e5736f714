"""Sequences on randomly placed pages, and forward passes over any mixture of their rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from gpu_worker.forward_batch import AttentionMetadata, ForwardBatch
from gpu_worker.kernels.kv_pool import NativeKVPool
from gpu_worker.models.native import NativeCausalLM


@dataclass
class Sequence:
    """Known tokens with their pages; the first num_computed have KV."""

    tokens: list[int]
    pages: list[int]
    num_computed: int = 0


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence in a pass: its next `count` tokens, or a tree behind the computed ones."""

    sequence: Sequence
    count: int
    tree_tokens: list[int] = field(default_factory=list)  # instead of the sequence's own
    tree_parents: list[int] = field(default_factory=list)  # row index; the root is its own parent


def ancestors(parents: list[int]) -> torch.Tensor:
    """[n, n] bool, ancestor or self."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent != node:
            mask[node] |= mask[parent]
    return mask


def slots_of(sequence: Sequence, indices: np.ndarray, page_size: int) -> np.ndarray:
    """Slots of the tokens with these indices."""
    return np.asarray(sequence.pages)[indices // page_size] * page_size + indices % page_size


def make_batch(rows: list[Rows], page_size: int) -> ForwardBatch:
    """The forward pass over all of `rows`."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    kv_lens, pages, masks, qo_indptr, page_indptr = [], [], [], [0], [0]
    for row in rows:
        start = row.sequence.num_computed
        indices = np.arange(start, start + row.count)
        slots += slots_of(row.sequence, indices, page_size).tolist()
        if row.tree_tokens:
            mask = ancestors(row.tree_parents)
            ids += row.tree_tokens
            positions += (start + mask.sum(1) - 1).tolist()
            masks.append(mask)
        else:
            ids += row.sequence.tokens[start : start + row.count]
            positions += indices.tolist()
            masks.append(None)
        kv_lens.append(start + row.count)
        pages += row.sequence.pages[: -(-kv_lens[-1] // page_size)]
        qo_indptr.append(len(ids))
        page_indptr.append(len(pages))
    return ForwardBatch(
        torch.tensor(ids),
        torch.tensor(positions),
        torch.tensor(slots),
        AttentionMetadata(
            page_size,
            np.array(qo_indptr, np.int32),
            np.array(kv_lens, np.int32),
            np.array(page_indptr, np.int32),
            np.array(pages, np.int32),
            tuple(masks),
        ),
    )


def run(model: NativeCausalLM, pool: NativeKVPool, rows: list[Rows]) -> list[torch.Tensor]:
    """One pass; hidden states of each entry of `rows`. Causal rows count as computed afterwards."""
    hidden = model.forward(make_batch(rows, pool.page_size), pool)
    for row in rows:
        if not row.tree_tokens:
            row.sequence.num_computed += row.count
    return list(hidden.split([row.count for row in rows]))


def place(
    rng: np.random.Generator, token_lists: list[list[int]], page_size: int, spare: int = 0
) -> list[Sequence]:
    """Sequences whose pages are drawn at random; `spare` is room for more tokens of each."""
    needed = [-(-(len(tokens) + spare) // page_size) for tokens in token_lists]
    order = rng.permutation(sum(needed) + 2)
    ends = np.cumsum(needed)
    return [
        Sequence(list(tokens), order[end - n : end].tolist())
        for tokens, n, end in zip(token_lists, needed, ends, strict=True)
    ]


def num_pages(sequences: list[Sequence]) -> int:
    """Pages of a pool that holds all of them and two that none uses."""
    return sum(len(sequence.pages) for sequence in sequences) + 2


def one_by_one(model: NativeCausalLM, tokens: list[int]) -> torch.Tensor:
    """Hidden states [n, h] of the tokens, each computed in a pass of its own: what all else is measured by."""
    sequence = Sequence(tokens, list(range(-(-len(tokens) // 16))))
    pool = model.new_pool(len(sequence.pages), 16)
    return torch.cat([run(model, pool, [Rows(sequence, 1)])[0] for _ in tokens])
