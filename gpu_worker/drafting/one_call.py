"""Chains and trees in one call of the kernels: nothing comes back between their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_worker.draft_tree import DraftTree, tree_of
from gpu_worker.drafting.tree_growth import TreeShape, confidences
from gpu_worker.kernels.draft_trees import GrownTrees, TreeStart
from gpu_worker.kv_pool import PagedPool
from gpu_worker.models.heads.base import HeadRows
from gpu_worker.request_state import RequestTable
from gpu_worker.sampling.sampler import PlainDraws


@dataclass(frozen=True)
class OneCall:
    """How the kernels draft for one head or model."""

    grow: Callable[[TreeStart, Any], GrownTrees]
    pool: PagedPool  # of the drafter's KV, which grow takes
    recycles: bool  # False: a whole model, which reads nothing but tokens

    def draft(
        self,
        table: RequestTable,
        slots: Sequence[int],
        budgets: Sequence[int],
        shape: TreeShape,
        draws: PlainDraws,
        state: HeadRows,
    ) -> DraftTree:
        """tree_growth.grow_trees for slots whose drafts are ranked as `draws` says."""
        lengths = [int(table.num_tokens[slot]) for slot in slots]
        pages: list[npt.NDArray[np.int32]] = []
        indptr = [0]
        for slot, length, budget in zip(slots, lengths, budgets, strict=True):
            num_pages = min(-(-(length + budget) // table.page_size), int(table.num_pages[slot]))
            pages.append(table.pages[slot, :num_pages])
            indptr.append(indptr[-1] + num_pages)
        start = TreeStart(
            hidden=state.recycled if self.recycles else None,
            normed=state.normed,
            page_size=table.page_size,
            lengths=np.array(lengths, dtype=np.int32),
            page_indptr=np.array(indptr, dtype=np.int32),
            page_indices=pages[0] if len(pages) == 1 else np.concatenate(pages),
            budgets=np.array(budgets, dtype=np.int32),
            max_depth=shape.max_depth,
            max_children=shape.max_children,
            least_value=shape.least_value,
            temperatures=draws.temperatures,
            seeds=draws.seeds,
        )
        grown = self.grow(start, self.pool)
        sure = [confidences(*of) for of in zip(grown.parents, grown.values, strict=True)]
        return tree_of(table.last_tokens(slots), grown.tokens, grown.parents, table.device, sure)
