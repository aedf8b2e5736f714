"""What drafters call on a draft head: pairs (token, hidden state before it) in, predictions of the next token out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.kernels.draft_trees import GrownTrees, TreeStart
from gpu_worker.kv_pool import PagedPool
from gpu_worker.models.base import OutputHead
from gpu_worker.models.heads.config import HeadConfig


@dataclass(frozen=True)
class HeadRows:
    """What a head gives for T rows."""

    recycled: torch.Tensor  # [T, h] stands for the target's hidden state in the next draft step
    normed: torch.Tensor  # [T, h] what the output head reads

    def select(self, rows: torch.Tensor) -> HeadRows:
        """The rows [n] int64."""
        return HeadRows(self.recycled.index_select(0, rows), self.normed.index_select(0, rows))


class DraftHead(Protocol):
    """A decoder head with its weights; stateless. Its KV lies in the pages of the target's, in a pool of its own."""

    config: HeadConfig
    token_ids: torch.Tensor | None  # [draft_vocab_size] int64 target id of each column; None: its own number
    dtype: torch.dtype  # of what it reads and gives
    device: torch.device

    @property
    def output(self) -> OutputHead:
        """draft_vocab_size columns."""
        ...

    def new_pool(self, num_pages: int, page_size: int) -> PagedPool:
        """KV memory in the form that `forward` takes. Raises DeviceError."""
        ...

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes that one page of its pool takes."""
        ...

    def forward(
        self,
        batch: ForwardBatch,
        features: torch.Tensor,
        pool: Any,
        attention: AttentionBackend,
        *,
        recycled: bool,
    ) -> HeadRows:
        """Runs T rows and writes their KV. Row i pairs batch.input_ids[i] with the state before that token:

        features [T, F] of the target, or what an earlier row gave as `recycled` [T, h].
        """
        ...


@runtime_checkable
class DraftsInOneCall(DraftHead, Protocol):
    """A head that drafts whole chains or trees, greedy or under coupled noise, without coming back between steps."""

    def tree(self, start: TreeStart, pool: Any) -> GrownTrees:
        """The chains or trees that drafting.tree_growth grows level by level."""
        ...


def new_head_pool(head: DraftHead, num_pages: int, page_size: int) -> PagedPool:
    """KV memory of a head, for `num_pages` pages of the ledger.

    A head that never attends slot 0 names its slots one by one (batching.hide_first_token), so its pool's pages are of
    one token. Raises DeviceError.
    """
    if head.config.attends_first_slot:
        return head.new_pool(num_pages, page_size)
    return head.new_pool(num_pages * page_size, 1)


def target_ids(token_ids: torch.Tensor | None, columns: torch.Tensor) -> torch.Tensor:
    """The target's ids of output columns (int64 of any shape); token_ids as in DraftHead."""
    return columns if token_ids is None else token_ids[columns]
