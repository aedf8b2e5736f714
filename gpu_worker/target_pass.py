"""The target's forward pass of a step: rows of prompts, decoding sequences and draft trees laid out as one batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.batching import SequenceRows, build_forward_batch
from gpu_worker.draft_tree import DraftTree
from gpu_worker.drafting.base import TargetHidden
from gpu_worker.kv_pool import PagedPool
from gpu_worker.models.base import CausalLM
from gpu_worker.request_state import Int64Array, RequestTable
from gpu_worker.transfers import to_device
from shared_mem.records import RowPlan


@dataclass(frozen=True)
class Step:
    """The rows of one plan laid out for the target's forward pass."""

    rows: tuple[RowPlan, ...]
    starts: list[int]  # num_computed of each row, counted here where the plan says FOLLOWS
    sampling: list[int]  # indices of rows that draw a token; request r of `tree` is rows[sampling[r]]
    slots: Int64Array  # [R] slots of the sampling rows
    tree: DraftTree  # one request per sampling row


class TargetPass(NamedTuple):
    """What the target's forward pass gave."""

    hidden: TargetHidden
    nodes: torch.Tensor  # [N, h] what the output head reads at the tree's nodes
    first_rows: list[int]  # of each plan row, in `hidden`


class TargetForward:
    """Runs the target over the rows of steps; its KV goes to the slots' pages."""

    def __init__(
        self, target: CausalLM, pool: PagedPool, attention: AttentionBackend, table: RequestTable
    ) -> None:
        self._target = target
        self._pool = pool
        self._attention = attention
        self._table = table

    def run(self, step: Step, layers: tuple[int, ...]) -> TargetPass:
        """The target's pass over all rows; drafts that only the device knows are taken from there."""
        batch, tree = build_forward_batch(self._table, self._layout(step)), step.tree
        qo_indptr = batch.attention.qo_indptr
        at: torch.Tensor | None = None  # rows of the tree's nodes; None: the rows are the nodes
        if tree.num_nodes < batch.num_rows and step.sampling:
            nodes = np.diff(tree.indptr)
            shifts = qo_indptr[1:][step.sampling] - tree.indptr[1:]  # a request's nodes are its last rows
            at = to_device(np.arange(tree.num_nodes) + np.repeat(shifts, nodes), self._table.device)
        if tree.has_drafts and tree.host_nodes is None:
            ids = tree.tokens if at is None else batch.input_ids.index_copy(0, at, tree.tokens)
            batch = replace(batch, input_ids=ids)
        hidden, captured = self._target.forward_capturing(
            batch, self._pool, self._attention, layers
        )  # [T, h]
        at_nodes = hidden if at is None else hidden.index_select(0, at)
        return TargetPass(TargetHidden(hidden, captured, layers), at_nodes, qo_indptr[:-1].tolist())

    def _layout(self, step: Step) -> list[SequenceRows]:
        tree, rows, starts = step.tree, step.rows, step.starts
        sequences = [
            SequenceRows(row.slot, start, row.num_query) for row, start in zip(rows, starts, strict=True)
        ]
        if not tree.has_drafts:
            return sequences
        ancestors = None if tree.is_chain() else tree.ancestors()
        depths, indptr = tree.shape.depths, tree.shape.indptr
        for r, i in enumerate(step.sampling):
            begin, end = indptr[r], indptr[r + 1]
            if end - begin == 1:
                continue
            assert rows[i].num_query == 1, "only decode rows draft"
            drafts = (0,) * (end - begin - 1)  # run puts those there that only the device knows
            if tree.host_nodes is not None:
                drafts = tuple(tree.host_nodes.tokens[begin + 1 : end])
            sequences[i] = SequenceRows(
                rows[i].slot,
                starts[i],
                1,
                drafts,
                tuple(starts[i] + depth for depth in depths[begin + 1 : end]),
                None if ancestors is None else ancestors[begin:end, begin:end],
            )
        return sequences
