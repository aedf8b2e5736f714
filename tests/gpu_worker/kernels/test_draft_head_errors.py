"""What draft heads refuse: parts that do not fit together, rows and chains that name what does not exist."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gpu_worker.kernels.linear import PackedLinear, WeightFormat
from gpu_worker.kernels.native import KernelError, NativeKernels
from tests.gpu_worker.kernels.conftest import BuildHead, Teams
from tests.gpu_worker.kernels.heads import SHAPE, VOCAB, tree_start
from tests.gpu_worker.kernels.schedules import Rows, Sequence, make_batch

H = SHAPE.hidden_size


def test_features_of_another_shape_are_refused(heads: BuildHead, teams: Teams) -> None:
    head = heads("eagle 3")
    pool = head.native.new_pool(1, 16)
    batch = make_batch([Rows(Sequence([1, 2], [0]), 2)], 16)
    for shape, recycled in (((2, H), False), ((2, 3 * H), True), ((1, 3 * H), False)):
        with pytest.raises(KernelError, match=r"features: torch\.float32"):
            head.native.forward(batch, pool, teams(1), torch.zeros(shape), recycled)
    with pytest.raises(KernelError, match="input_ids: 300"):
        head.native.forward(
            dataclasses.replace(batch, input_ids=torch.tensor([1, 300])),
            pool,
            teams(1),
            torch.zeros(2, 3 * H),
            False,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budgets": np.array([5], np.int32)}, "1 pages of sequence 0 do not hold 17 keys"),
        ({"budgets": np.array([-1], np.int32)}, "budgets: -1 of sequence 0"),
        ({"lengths": np.array([0], np.int32)}, "lengths: 0 of sequence 0"),
        ({"max_depth": 0}, "max_depth, max_children: 0, 1"),
        ({"max_children": 65}, "max_depth, max_children: 9, 65"),
        ({"page_indices": np.array([2], np.int32)}, "page_indices: 2 of request 0 is outside the pool"),
        ({"page_size": 8}, "page_size: 8 in the batch, 16 in the pool"),
        ({"hidden": torch.zeros(1, H - 1)}, r"hidden: torch\.float32"),
        ({"hidden": None}, "hidden: a draft head begins with it"),
        ({"page_indptr": np.array([0, 2], np.int32)}, "page_indptr: ends at 2, there are 1 pages"),
    ],
)
def test_bad_starts_are_refused_before_anything_runs(
    heads: BuildHead, teams: Teams, changes: dict[str, object], message: str
) -> None:
    head = heads("mtp")
    pool = head.native.new_pool(2, 16)
    start = tree_start([Sequence([1], [0], 13)], torch.zeros(1, H), torch.zeros(1, H), [3], 9, 1)
    with pytest.raises(KernelError, match=message):
        head.native.tree(dataclasses.replace(start, **changes), pool, teams(1), head.lm_head)
    assert not any(part.any() for part in pool.read(0, torch.arange(32)))


def test_positions_behind_the_last_are_refused(heads: BuildHead, teams: Teams) -> None:
    head = heads("mtp")
    long = Sequence([1], list(range(33)), 510)
    start = tree_start([long], torch.zeros(1, H), torch.zeros(1, H), [4], 4, 1)
    with pytest.raises(KernelError, match="lengths: 510 of sequence 0 and its drafts pass 511"):
        head.native.tree(start, head.native.new_pool(33, 16), teams(1), head.lm_head)


def test_bad_heads_of_drafts_are_refused(heads: BuildHead, teams: Teams, kernels: NativeKernels) -> None:
    head = heads("mtp")
    start = tree_start([Sequence([1], [0], 1)], torch.zeros(1, H), torch.zeros(1, H), [1], 2, 1)

    def chain(lm_head: PackedLinear, target_ids: torch.Tensor | None = None) -> None:
        head.native.tree(start, head.native.new_pool(1, 16), teams(1), lm_head, target_ids)

    with pytest.raises(KernelError, match="lm_head: of 64 inputs, expected 96"):
        chain(PackedLinear(kernels, WeightFormat.Q8_0, 32, 64))
    with pytest.raises(KernelError, match="lm_head: 301 columns, the embedding has 300 rows"):
        chain(PackedLinear(kernels, WeightFormat.Q8_0, VOCAB + 1, H))
    with pytest.raises(KernelError, match=r"target_ids: torch\.int64 \[3\], expected torch\.int64 \[200\]"):
        chain(head.lm_head, head.target_ids[:3].contiguous())
    with pytest.raises(KernelError, match="target_ids: 300 is not in"):
        chain(head.lm_head, torch.full_like(head.target_ids, VOCAB))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mtp", {"combine": None}, r"layers\[0\]\.qkv: not of 192 outputs and 192 inputs"),
        ("eagle 3", {"fuse": "narrow"}, "fuse: not of 96 outputs"),
        ("mtp", {"residual_is_normed": True}, "residual_is_normed"),
        ("mtp", {"feature_norm": torch.ones(H + 1)}, r"feature_norm: torch\.float32 \[97\]"),
        ("mtp", {"layers": []}, "num_layers: 0"),
        (
            "eagle 3",
            {"feature_norm": None, "residual_is_normed": True},
            "residual_is_normed: no feature_norm",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    heads: BuildHead, kernels: NativeKernels, name: str, changes: dict[str, object], message: str
) -> None:
    head = heads(name)
    if changes.get("fuse") == "narrow":
        changes = {"fuse": PackedLinear(kernels, WeightFormat.Q8_0, H - 1, 3 * H)}
    weights = dataclasses.replace(head.native.weights, **changes)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match=message):
        type(head.native)(kernels, SHAPE, head.embedding, head.cos, head.sin, weights)


def test_a_first_norm_beside_the_norms_of_the_pair_is_refused(
    heads: BuildHead, kernels: NativeKernels
) -> None:
    head = heads("eagle 3")
    layer = dataclasses.replace(head.native.weights.layers[0], attn_norm=torch.ones(H))
    weights = dataclasses.replace(head.native.weights, layers=[layer])
    with pytest.raises(KernelError, match=r"layers\[0\]\.attn_norm"):
        type(head.native)(kernels, SHAPE, head.embedding, head.cos, head.sin, weights)
