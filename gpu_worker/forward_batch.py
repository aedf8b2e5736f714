"""What one forward pass of one model reads: rows of mixed prefill, decode and verify requests. A leaf module."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class AttentionMetadata:
    """Which keys each row may see, in FlashInfer's terms. B requests, T query rows.

    Request b's query rows are qo_indptr[b] .. qo_indptr[b+1] - 1; its keys are the first kv_lens[b] token slots of
    its pages page_indices[page_indptr[b] : page_indptr[b+1]], of which the last num_query are the rows' own (written
    before attention runs). Row j of a causal request sees keys 0 .. kv_lens[b] - num_query + j. A request with a
    tree instead sees all of its prefix (kv_lens[b] - num_query keys) and, among its own rows, those that tree_masks[b]
    allows.
    """

    page_size: int
    qo_indptr: npt.NDArray[np.int32]  # [B + 1]
    kv_lens: npt.NDArray[np.int32]  # [B], this step's rows included
    page_indptr: npt.NDArray[np.int32]  # [B + 1]
    page_indices: npt.NDArray[np.int32]  # [sum of pages]
    # Per request: None (causal) or [q, q] bool on the host, where passes are planned; ancestor-or-self.
    tree_masks: tuple[torch.Tensor | None, ...]

    @property
    def num_requests(self) -> int:
        return len(self.kv_lens)


@dataclass(frozen=True)
class ForwardBatch:
    """Inputs of one forward pass. T rows; `out_slots` is page_id * page_size + offset of each row's own KV.

    Not to be written to, nor kept beyond the pass: they may be views of the request table.
    """

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, rotary positions (a tree node's is its depth behind the root)
    out_slots: torch.Tensor  # [T] int64
    attention: AttentionMetadata

    @property
    def num_rows(self) -> int:
        return int(self.input_ids.shape[0])
