"""One cold forward pass over all tokens of one sequence: what every incremental way has to agree with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.attention.cpu import CPUAttention
from gpu_worker.batching import SequenceRows, build_forward_batch, hide_first_token
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.models.base import CausalLM
from gpu_worker.models.heads.base import DraftHead, HeadRows
from gpu_worker.request_state import RequestTable
from shared_mem.records import Admission, PageUpdate, SamplingRecord


def forward_whole(
    model: CausalLM, tokens: Sequence[int], page_size: int = 16, attention: AttentionBackend | None = None
) -> tuple[torch.Tensor, Any]:
    """(hidden [n, h], the pool with the KV of tokens 0..n-1 in slots 0..n-1)."""
    pool = model.new_pool(-(-len(tokens) // page_size), page_size)
    return model.forward(whole_batch(tokens, page_size), pool, attention or CPUAttention()), pool


def head_whole(
    head: DraftHead, model: CausalLM, tokens: Sequence[int], page_size: int = 16
) -> tuple[HeadRows, Any]:
    """A draft head over all pairs (t_i, H_{i-1}) of one sequence, with the target's own hidden states: rows, pool."""
    attention = CPUAttention()
    num_pages = -(-len(tokens) // page_size)
    batch = whole_batch(tokens, page_size)
    pool = model.new_pool(num_pages, page_size)
    normed, captured = model.forward_capturing(
        batch, pool, attention, head.config.hidden_layers(model.num_layers)
    )
    hidden = normed if captured is None else captured
    before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
    if head.config.attends_first_slot:
        pool = head.new_pool(num_pages, page_size)
        return head.forward(batch, before, pool, attention, recycled=False), pool
    table = whole_table(tokens, page_size)
    rows = [SequenceRows(0, 1, len(tokens) - 1)]
    batch = hide_first_token(build_forward_batch(table, rows), table, rows)
    pool = head.new_pool(num_pages * page_size, 1)
    return head.forward(batch, before[1:], pool, attention, recycled=False), pool


def whole_table(tokens: Sequence[int], page_size: int) -> RequestTable:
    """One sequence in slot 0, whose KV goes to slots 0..n-1."""
    table = RequestTable(1, len(tokens), page_size, torch.device("cpu"))
    table.admit(Admission(0, 0, np.array(tokens, dtype=np.int32), len(tokens), 0, 0, SamplingRecord()))
    table.set_pages(PageUpdate(0, 0, np.arange(-(-len(tokens) // page_size), dtype=np.int32)))
    return table


def whole_batch(tokens: Sequence[int], page_size: int) -> ForwardBatch:
    """The forward pass over one sequence alone."""
    return build_forward_batch(whole_table(tokens, page_size), [SequenceRows(0, 0, len(tokens))])
