"""The CPU attention backend against the reference, over random page tables, lengths, chains and trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.attention.cpu import MAX_GROUPED_ROWS, CPUAttention
from gpu_worker.attention.grouping import (
    FREE_PADDING_KEYS,
    MAX_GROUP_KEYS,
    MAX_PADDING_RATIO,
    group_few_rows,
)
from gpu_worker.attention.reference import ReferenceAttention

from .batches import Batch, RequestShape, random_batch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def assert_equals_reference(batch: Batch, backend: CPUAttention | None = None) -> torch.Tensor:
    backend = backend or CPUAttention()
    backend.plan(batch.metadata)
    actual = backend.run(batch.query, batch.keys, batch.values, 0.3)
    reference = ReferenceAttention()
    reference.plan(batch.metadata)
    expected = reference.run(batch.query, batch.keys, batch.values, 0.3)
    assert actual.shape == batch.query.shape
    assert actual.dtype == batch.query.dtype
    tolerance = TOLERANCE[batch.query.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    return actual


few_rows = st.builds(RequestShape, prefix=st.integers(0, 40), rows=st.integers(1, 8), tree=st.booleans())
prefills = st.builds(RequestShape, prefix=st.sampled_from([0, 0, 1, 7, 30]), rows=st.integers(17, 40))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    shapes=st.lists(st.one_of(few_rows, few_rows, prefills), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([(1, 1), (1, 4), (2, 3), (3, 1)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10_000),
)
def test_random_batches_equal_the_reference(shapes, page_size, heads, dtype, seed):
    batch = random_batch(
        shapes, page_size=page_size, num_kv_heads=heads[0], repeats=heads[1], dtype=dtype, seed=seed
    )
    assert_equals_reference(batch)


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_behind_a_prefix_spans_blocks(monkeypatch, consecutive, dtype):
    monkeypatch.setattr("gpu_worker.attention.cpu.PREFILL_BLOCK_ROWS", 16)
    shapes = [RequestShape(5, MAX_GROUPED_ROWS + 30), RequestShape(0, 50), RequestShape(9, 1)]
    assert_equals_reference(random_batch(shapes, consecutive_pages=consecutive, dtype=dtype))


def test_decode_rows_alone_need_no_reordering():
    batch = random_batch([RequestShape(n, 1) for n in (3, 3, 3, 3)])
    assert_equals_reference(batch)


def test_a_wide_tree_keeps_siblings_apart():
    """Changing one child's value must not move its sibling or the root."""
    batch = random_batch([RequestShape(6, 3, tree=True)])
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    object.__setattr__(batch.metadata, "tree_masks", (mask,))
    before = assert_equals_reference(batch)
    slot = 7  # token position of node 1
    page = int(batch.metadata.page_indices[slot // 4])
    batch.values[page * 4 + slot % 4] += 1.0
    after = assert_equals_reference(batch)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


def test_one_backend_serves_passes_of_different_shapes():
    """Scratch and cached indices of an earlier plan must not leak into the next."""
    backend = CPUAttention()
    for seed, shapes in enumerate(
        [
            [RequestShape(30, 5), RequestShape(31, 5)],
            [RequestShape(2, 1)],
            [RequestShape(40, 8, tree=True), RequestShape(0, 30), RequestShape(12, 2)],
            [RequestShape(30, 5), RequestShape(31, 5)],
        ]
    ):
        assert_equals_reference(random_batch(shapes, seed=seed), backend)
        assert_equals_reference(random_batch(shapes, seed=seed + 50, num_kv_heads=3, repeats=1), backend)


def test_empty_batch_and_request_without_rows():
    backend = CPUAttention()
    batch = random_batch([RequestShape(4, 0), RequestShape(5, 2)])
    assert_equals_reference(batch, backend)
    nothing = random_batch([])
    backend.plan(nothing.metadata)
    assert backend.run(nothing.query, nothing.keys, nothing.values, 1.0).shape == (0, 6, 8)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(lengths=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 16)), min_size=1, max_size=40))
def test_groups_cover_every_request_once_with_bounded_padding(lengths):
    batch = random_batch([], page_size=16)
    rows = [q for _, q in lengths]
    kv_lens = np.array([p + q for p, q in lengths], dtype=np.int32)
    num_pages = -(-kv_lens // 16)
    meta = type(batch.metadata)(
        page_size=16,
        qo_indptr=np.cumsum([0, *rows]).astype(np.int32),
        kv_lens=kv_lens,
        page_indptr=np.cumsum([0, *num_pages]).astype(np.int32),
        page_indices=np.arange(num_pages.sum(), dtype=np.int32),
        tree_masks=(None,) * len(lengths),
    )
    groups = group_few_rows(meta, list(range(len(lengths))))
    seen = np.concatenate([g.rows[g.valid] for g in groups])
    assert sorted(seen.tolist()) == list(range(sum(rows)))
    for group in groups:
        (block,) = group.blocks
        num_keys = block.slots.size
        needed = num_keys if block.padding_bias is None else int((block.padding_bias == 0).sum())
        assert num_keys <= max(MAX_GROUP_KEYS, block.slots.shape[1])
        assert num_keys <= needed * (1 + MAX_PADDING_RATIO) + FREE_PADDING_KEYS
        assert group.valid.shape[1] <= 4 or group.valid.sum(1).min() * 2 >= group.valid.shape[1]
