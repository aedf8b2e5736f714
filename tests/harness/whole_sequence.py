"""One cold forward pass over all tokens of one sequence: what every incremental way has to agree with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.attention.cpu import CPUAttention
from gpu_worker.batching import SequenceRows, build_forward_batch
from gpu_worker.models.base import CausalLM
from gpu_worker.request_state import RequestTable
from shared_mem.records import Admission, PageUpdate, SamplingRecord


def forward_whole(
    model: CausalLM, tokens: Sequence[int], page_size: int = 16, attention: AttentionBackend | None = None
) -> tuple[torch.Tensor, Any]:
    """(hidden [n, h], the pool with the KV of tokens 0..n-1 in slots 0..n-1)."""
    num_pages = -(-len(tokens) // page_size)
    table = RequestTable(1, len(tokens), page_size, torch.device("cpu"))
    table.admit(Admission(0, 0, np.array(tokens, dtype=np.int32), len(tokens), 0, 0, SamplingRecord()))
    table.set_pages(PageUpdate(0, 0, np.arange(num_pages, dtype=np.int32)))
    pool = model.new_pool(num_pages, page_size)
    batch = build_forward_batch(table, [SequenceRows(0, 0, len(tokens))])
    return model.forward(batch, pool, attention or CPUAttention()), pool
