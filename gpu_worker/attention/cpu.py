"""The serving attention backend in plain torch: runs on any torch device, tuned for CPUs.

Requests with few rows (decode, verify, trees) are gathered in groups of similar length and go through two
batched matrix products; long prefills go through scaled_dot_product_attention one request at a time. Which
rows go where, and every index, is settled once a forward pass; README.md has the measurements behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from gpu_worker.attention.grouping import FewRows, group_few_rows
from gpu_worker.forward_batch import AttentionMetadata
from gpu_worker.transfers import to_device

# Causal requests with at most this many rows are grouped; with more, a request fills a core by itself.
MAX_GROUPED_ROWS = 16
# Rows of a prefill that are masked at once: bounds the mask of a chunk behind a long prefix.
PREFILL_BLOCK_ROWS = 512


@dataclass(frozen=True)
class _Block:
    """A KeyBlock on the device; see grouping.py for what its parts mean."""

    slots: torch.Tensor  # [G, K] int64
    padding_bias: torch.Tensor | None  # [G, 1, K] float32
    row_bias: torch.Tensor | None  # [G or 1, Q, Q] float32, for the last Q columns


@dataclass(frozen=True)
class _Group:
    """FewRows on the device: G requests of Q rows."""

    num_requests: int
    num_rows: int  # Q
    rows: torch.Tensor | None  # [G * Q] int64 query rows; None: all rows of the batch, in order
    valid: torch.Tensor | None  # [n] int64 positions in G * Q that are real rows; None: all
    target_rows: torch.Tensor  # [n] int64 output rows of `valid`
    blocks: tuple[_Block, ...]


@dataclass(frozen=True)
class _Prefill:
    """A run of rows of one request with many rows."""

    first_row: int
    num_rows: int
    num_keys: int
    first_slot: int | None  # the keys lie in consecutive slots from here: no gather
    slots: torch.Tensor | None  # [num_keys] int64 otherwise
    bias: torch.Tensor | None  # [num_rows, num_keys] float32 of 0 and -inf; None: plainly causal from key 0


class CPUAttention:
    """Implements AttentionBackend. One instance serves one model; not for use by two threads at once."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._groups: list[_Group] = []
        self._prefills: list[_Prefill] = []
        self._num_rows = 0
        # Indices into [slots * Hkv, D], by block: they depend on Hkv, which only run() knows.
        self._head_indices: dict[tuple[int, int], torch.Tensor] = {}
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def plan(self, metadata: AttentionMetadata) -> None:
        """Sorts requests into groups and prefills and uploads indices; O(sum of kv_lens) on the host."""
        self._head_indices.clear()
        self._num_rows = int(metadata.qo_indptr[-1])
        num_query = np.diff(metadata.qo_indptr)
        few: list[int] = []
        self._prefills = []
        for b in range(metadata.num_requests):
            if num_query[b] == 0:
                continue
            if metadata.tree_masks[b] is not None or num_query[b] <= MAX_GROUPED_ROWS:
                few.append(b)
            else:
                self._prefills += self._plan_prefill(metadata, b)
        groups = group_few_rows(metadata, few)
        self._groups = [self._upload(group) for group in groups]

    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See AttentionBackend.run: query [T, Hq, D], keys and values [slots, Hkv, D] -> [T, Hq, D]."""
        assert query.shape[0] == self._num_rows, "plan comes before run, for the same rows"
        if len(self._groups) == 1 and self._groups[0].rows is None:
            return self._run_group(self._groups[0], query, keys, values, scale).to(query.dtype)
        output = torch.empty_like(query)
        for group in self._groups:
            result = self._run_group(group, query, keys, values, scale).to(query.dtype)
            if group.valid is not None:
                result = result.index_select(0, group.valid)
            output.index_copy_(0, group.target_rows, result)
        for prefill in self._prefills:
            rows = slice(prefill.first_row, prefill.first_row + prefill.num_rows)
            output[rows] = self._run_prefill(prefill, query[rows], keys, values, scale)
        return output

    # -- few rows --

    def _upload(self, group: FewRows) -> _Group:
        def tensor(array: npt.NDArray[np.int64]) -> torch.Tensor:
            return to_device(array, self._device)

        def bias(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else to_device(values, self._device)

        flat_rows = group.rows.ravel()
        valid = np.flatnonzero(group.valid.ravel())
        everything = len(flat_rows) == self._num_rows and bool((flat_rows == np.arange(self._num_rows)).all())
        return _Group(
            num_requests=len(group.rows),
            num_rows=group.rows.shape[1],
            rows=None if everything else tensor(flat_rows),
            valid=None if len(valid) == len(flat_rows) else tensor(valid),
            target_rows=tensor(flat_rows[valid]),
            blocks=tuple(
                _Block(tensor(block.slots), bias(block.padding_bias), bias(block.row_bias))
                for block in group.blocks
            ),
        )

    def _run_group(
        self, group: _Group, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[G * Q, Hq, D] float32, padding rows included."""
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = keys.shape[1]
        repeats = num_heads // num_kv_heads
        rows = query if group.rows is None else query.index_select(0, group.rows)
        # The query heads of one KV head are further rows against the same keys: nothing is repeated.
        q = (rows.float() * scale).view(group.num_requests, group.num_rows, num_kv_heads, repeats, head_dim)
        q = q.transpose(1, 2).reshape(group.num_requests * num_kv_heads, group.num_rows * repeats, head_dim)
        if len(group.blocks) == 1:
            weights = torch.softmax(self._scores(q, group, group.blocks[0], keys), dim=-1)
            out = torch.bmm(weights, self._values(q, group.blocks[0], values))
        else:
            # A tree: unmasked prefix pass and masked pass over its own rows.
            out = _merge(*(self._partial(q, group, block, keys, values) for block in group.blocks))
        out = out.view(group.num_requests, num_kv_heads, group.num_rows, repeats, head_dim)
        return out.transpose(1, 2).reshape(group.num_requests * group.num_rows, num_heads, head_dim)

    def _scores(self, q: torch.Tensor, group: _Group, block: _Block, keys: torch.Tensor) -> torch.Tensor:
        """[G * Hkv, Q * repeats, K] float32, -inf at what a row may not see. q [G * Hkv, Q * repeats, D]."""
        num_keys = block.slots.shape[1]
        k = self._gather("keys", keys, block).view(q.shape[0], num_keys, -1)
        scores = torch.bmm(q, k.transpose(1, 2))
        # [G, Hkv, Q, repeats, K]: one bias for all heads
        by_row = scores.view(group.num_requests, keys.shape[1], group.num_rows, -1, num_keys)
        if block.padding_bias is not None:
            by_row.add_(block.padding_bias[:, None, :, None, :])
        if block.row_bias is not None:
            by_row[..., num_keys - group.num_rows :].add_(block.row_bias[:, None, :, None, :])
        return scores

    def _values(self, q: torch.Tensor, block: _Block, values: torch.Tensor) -> torch.Tensor:
        """[G * Hkv, K, D] float32."""
        return self._gather("values", values, block).view(q.shape[0], block.slots.shape[1], -1)

    def _partial(
        self, q: torch.Tensor, group: _Group, block: _Block, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One block's (sum of values weighted by exp(score - maximum), maximum, sum of these weights).

        [G * Hkv, Q * repeats, D] and twice [G * Hkv, Q * repeats, 1].
        """
        scores = self._scores(q, group, block, keys)
        maximum = scores.amax(dim=-1, keepdim=True)
        weights = scores.sub_(maximum).exp_()
        return torch.bmm(weights, self._values(q, block, values)), maximum, weights.sum(dim=-1, keepdim=True)

    def _gather(self, name: str, pool: torch.Tensor, block: _Block) -> torch.Tensor:
        """[G * Hkv * K, D] float32 in scratch that the next call with this name overwrites.

        Scratch is reused over layers because fresh memory costs more in page faults than the copy itself.
        """
        num_kv_heads, head_dim = pool.shape[1:]
        key = (id(block), num_kv_heads)
        index = self._head_indices.get(key)
        if index is None:
            heads = torch.arange(num_kv_heads, device=self._device)
            index = (block.slots[:, None, :] * num_kv_heads + heads[None, :, None]).reshape(-1)
            self._head_indices[key] = index
        gathered = self._scratch_rows(name, pool.dtype, index.numel(), head_dim)
        torch.index_select(pool.view(-1, head_dim), 0, index, out=gathered)
        if pool.dtype == torch.float32:
            return gathered
        return self._scratch_rows(name, torch.float32, index.numel(), head_dim).copy_(gathered)

    def _scratch_rows(self, name: str, dtype: torch.dtype, num_rows: int, width: int) -> torch.Tensor:
        buffer = self._scratch.get((name, dtype))
        if buffer is None or buffer.numel() < num_rows * width:
            buffer = torch.empty(num_rows * width * 5 // 4, dtype=dtype, device=self._device)
            self._scratch[name, dtype] = buffer
        return buffer[: num_rows * width].view(num_rows, width)

    # -- many rows --

    def _plan_prefill(self, metadata: AttentionMetadata, b: int) -> list[_Prefill]:
        first_row, end_row = int(metadata.qo_indptr[b]), int(metadata.qo_indptr[b + 1])
        kv_len = int(metadata.kv_lens[b])
        prefix = kv_len - (end_row - first_row)
        pages = metadata.page_indices[metadata.page_indptr[b] : metadata.page_indptr[b + 1]].astype(np.int64)
        consecutive = bool((np.diff(pages) == 1).all())
        slots = None
        if not consecutive:
            host = (pages[:, None] * metadata.page_size + np.arange(metadata.page_size)).ravel()[:kv_len]
            slots = to_device(host, self._device)
        prefills = []
        for row in range(first_row, end_row, PREFILL_BLOCK_ROWS):
            num_rows = min(PREFILL_BLOCK_ROWS, end_row - row)
            num_before = prefix + row - first_row
            num_keys = num_before + num_rows
            bias = None
            if num_before:
                visible = torch.ones(num_rows, num_keys, dtype=torch.bool).tril_(num_before)
                bias = to_device(
                    torch.zeros(num_rows, num_keys).masked_fill_(~visible, -torch.inf), self._device
                )
            prefills.append(
                _Prefill(
                    first_row=row,
                    num_rows=num_rows,
                    num_keys=num_keys,
                    first_slot=int(pages[0]) * metadata.page_size if consecutive else None,
                    slots=None if slots is None else slots[:num_keys],
                    bias=bias,
                )
            )
        return prefills

    def _run_prefill(
        self, prefill: _Prefill, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """query [num_rows, Hq, D] of the prefill's rows -> [num_rows, Hq, D]."""
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = keys.shape[1]
        repeats = num_heads // num_kv_heads
        if prefill.slots is None:
            assert prefill.first_slot is not None
            span = slice(prefill.first_slot, prefill.first_slot + prefill.num_keys)
            k, v = keys[span], values[span]
        else:
            k, v = keys.index_select(0, prefill.slots), values.index_select(0, prefill.slots)
        # [repeats, Hkv, rows, D] against keys expanded (stride 0, not copied) over the first dimension.
        q = query.to(k.dtype).view(-1, num_kv_heads, repeats, head_dim).permute(2, 1, 0, 3)
        k = k.transpose(0, 1).expand(repeats, -1, -1, -1)
        v = v.transpose(0, 1).expand(repeats, -1, -1, -1)
        bias = None if prefill.bias is None else prefill.bias.to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale)
        return out.permute(2, 1, 0, 3).reshape(-1, num_heads, head_dim).to(query.dtype)


def _merge(
    first: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The attention over the union of two key sets from (weighted sum, maximum, sum of weights) of each.

    The log-sum-exp merge of FlashAttention's split reductions (Dao et al., arXiv 2205.14135, section 3.1).
    """
    out_1, max_1, sum_1 = first
    out_2, max_2, sum_2 = second
    maximum = torch.maximum(max_1, max_2)
    scale_1, scale_2 = max_1.sub_(maximum).exp_(), max_2.sub_(maximum).exp_()
    total = sum_1.mul_(scale_1).add_(sum_2.mul_(scale_2))
    return out_1.mul_(scale_1).add_(out_2.mul_(scale_2)).div_(total)
