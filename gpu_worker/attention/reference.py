"""The oracle of every attention backend: slow, obvious, float64. For tests; nothing serves with it."""

from __future__ import annotations

import torch

from gpu_worker.forward_batch import AttentionMetadata


class ReferenceAttention:
    """One request, one row and one head at a time, exactly as AttentionMetadata words it."""

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None

    def plan(self, metadata: AttentionMetadata) -> None:
        """Keeps the metadata; there is nothing to prepare."""
        self._metadata = metadata

    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See AttentionBackend.run: query [T, Hq, D], keys and values [slots, Hkv, D] -> [T, Hq, D]."""
        meta = self._metadata
        assert meta is not None, "plan comes before run"
        output = torch.zeros_like(query)
        queries_per_kv_head = query.shape[1] // keys.shape[1]
        for b in range(meta.num_requests):
            first_row = int(meta.qo_indptr[b])
            num_query = int(meta.qo_indptr[b + 1]) - first_row
            prefix = int(meta.kv_lens[b]) - num_query
            pages = meta.page_indices[meta.page_indptr[b] : meta.page_indptr[b + 1]].tolist()
            tree_mask = meta.tree_masks[b]
            for j in range(num_query):
                visible = list(range(prefix))
                for i in range(num_query):
                    if i <= j if tree_mask is None else bool(tree_mask[j, i]):
                        visible.append(prefix + i)
                slots = [pages[t // meta.page_size] * meta.page_size + t % meta.page_size for t in visible]
                for head in range(query.shape[1]):
                    k = keys[slots, head // queries_per_kv_head].double()  # [visible, D]
                    v = values[slots, head // queries_per_kv_head].double()
                    weights = torch.softmax(k @ query[first_row + j, head].double() * scale, dim=0)
                    output[first_row + j, head] = (weights @ v).to(query.dtype)
        return output
