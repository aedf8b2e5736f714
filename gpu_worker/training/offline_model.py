"""A draft model seen as a draft head that reads no features, for the offline measurement."""

from __future__ import annotations

from typing import Any

import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.kv_pool import PagedPool
from gpu_worker.models.heads.base import HeadRows
from gpu_worker.models.heads.config import HeadConfig, HeadKind
from gpu_worker.weights.draft_checkpoint import DraftModel


class DraftModelAsHead:
    """Implements DraftHead; its hidden state is what would be recycled, and is not read."""

    def __init__(self, draft: DraftModel, vocab_size: int) -> None:
        """vocab_size: the target's."""
        model = draft.model
        self._model = model
        self.dtype, self.device = model.dtype, model.device
        self.token_ids = draft.draft_ids
        self.output = model.output_head(draft.draft_ids)
        self.config = HeadConfig(
            kind=HeadKind.EAGLE,  # a decoder head
            hidden_size=model.config.hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=self.output.num_columns,
            max_position_embeddings=model.config.max_position_embeddings,
        )

    def new_pool(self, num_pages: int, page_size: int) -> PagedPool:
        """See DraftHead.new_pool."""
        return self._model.new_pool(num_pages, page_size)

    def bytes_per_page(self, page_size: int) -> int:
        """See DraftHead.bytes_per_page."""
        return self._model.bytes_per_page(page_size)

    def forward(
        self,
        batch: ForwardBatch,
        features: torch.Tensor,
        pool: Any,
        attention: AttentionBackend,
        *,
        recycled: bool,
    ) -> HeadRows:
        """See DraftHead.forward."""
        hidden = self._model.forward(batch, pool, attention)
        return HeadRows(hidden, hidden)
