"""Attention of an unrolled draft: the conversation's own keys, and each row's private keys of its later draft steps.

While it drafts step k, a served head sees the pairs up to its row (made from the target's hidden states, step 0) and
the k pairs that the draft itself appended. The latter belong to one row alone, so in training they are a handful of
columns beside the scores of step 0, not a mask over all steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from gpu_worker.layers.rotary import rotate
from gpu_worker.models.heads.config import HeadConfig
from gpu_worker.training.batches import Span
from gpu_worker.training.modules.parts import Projection

Rotary = tuple[torch.Tensor, torch.Tensor]  # RotaryEmbedding.at of the rows' positions


@dataclass
class Layout:
    """Which keys of step 0 the query rows of a batch may see."""

    spans: tuple[Span, ...]
    masks: list[
        torch.Tensor
    ]  # per span [group * rows, tokens], 0 or -inf; group = query heads of one key head

    @classmethod
    def of(cls, spans: tuple[Span, ...], rows: torch.Tensor, group: int, dtype: torch.dtype) -> Layout:
        """rows [R]: the token index of each query; it sees the tokens of its span up to itself."""
        masks = []
        for span in spans:
            queries = rows[span.first_row : span.end_row, None]
            keys = torch.arange(span.first_token, span.end_token, device=rows.device)
            mask = torch.zeros(len(queries), len(keys), dtype=dtype, device=rows.device)
            masks.append(mask.masked_fill_(keys > queries, float("-inf")).repeat(group, 1))
        return cls(spans, masks)


@dataclass
class DraftKeys:
    """What one layer has stored so far: step 0 of every token, later steps of every query row."""

    keys: torch.Tensor  # [N, Hkv, D]
    values: torch.Tensor
    later_keys: list[torch.Tensor] = field(default_factory=list)  # per step [R, Hkv, D]
    later_values: list[torch.Tensor] = field(default_factory=list)


class UnrolledAttention(nn.Module):
    """Grouped-query attention with rotary positions; `width` is what the projections read."""

    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Projection(width, q, bias=config.qkv_bias)
        self.k_proj = Projection(width, kv, bias=config.qkv_bias)
        self.v_proj = Projection(width, kv, bias=config.qkv_bias)
        self.o_proj = Projection(q, config.hidden_size, bias=False)

    def first(
        self, x: torch.Tensor, rotary: Rotary, queries: torch.Tensor | None, layout: Layout
    ) -> tuple[torch.Tensor, DraftKeys]:
        """Step 0: x [N, width] of all tokens; queries [R] names those to answer for, None all. Returns [R, h]."""
        keys, values = self._keys_and_values(x, rotary)
        stored = DraftKeys(keys, values)
        if queries is not None:
            x, rotary = x[queries], (rotary[0][queries], rotary[1][queries])
        return self._attend(x, rotary, stored, layout), stored

    def later(self, x: torch.Tensor, rotary: Rotary, stored: DraftKeys, layout: Layout) -> torch.Tensor:
        """A further step: x [R, width] -> [R, h]; adds the rows' keys to `stored`."""
        keys, values = self._keys_and_values(x, rotary)
        stored.later_keys.append(keys)
        stored.later_values.append(values)
        return self._attend(x, rotary, stored, layout)

    def _keys_and_values(self, x: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (-1, self._kv_heads, self._head_dim)
        return rotate(self.k_proj(x).view(shape), *rotary), self.v_proj(x).view(shape)

    def _attend(self, x: torch.Tensor, rotary: Rotary, stored: DraftKeys, layout: Layout) -> torch.Tensor:
        q = rotate(self.q_proj(x).view(-1, self._heads, self._head_dim), *rotary) * self._head_dim**-0.5
        q = q.view(len(x), self._kv_heads, -1, self._head_dim)  # [R, Hkv, G, D]
        own = None  # [Hkv, G, R, k]: scores of the rows' private keys
        if stored.later_keys:
            of_keys = [(q * keys.unsqueeze(2)).sum(-1) for keys in stored.later_keys]
            own = torch.stack(of_keys, -1).permute(1, 2, 0, 3)
        q = q.permute(1, 2, 0, 3)  # [Hkv, G, R, D]
        outputs, own_weights = [], []
        for span, mask in zip(layout.spans, layout.masks, strict=True):
            rows, tokens = slice(span.first_row, span.end_row), slice(span.first_token, span.end_token)
            keys, values = stored.keys[tokens].transpose(0, 1), stored.values[tokens].transpose(0, 1)
            queries = q[:, :, rows].flatten(1, 2)  # [Hkv, G * r, D]
            scores = torch.baddbmm(mask.unsqueeze(0), queries, keys.transpose(1, 2))
            if own is not None:
                scores = torch.cat((scores, own[:, :, rows].flatten(1, 2)), dim=-1)
            weights = scores.softmax(-1)
            count = span.end_token - span.first_token
            output = torch.bmm(weights[..., :count], values)
            outputs.append(torch.unflatten(output, 1, (q.shape[1], -1)))
            if own is not None:
                own_weights.append(torch.unflatten(weights[..., count:], 1, (q.shape[1], -1)))
        output = torch.cat(outputs, dim=2).permute(2, 0, 1, 3)  # [R, Hkv, G, D]
        if own is not None:
            shares = torch.cat(own_weights, dim=2).permute(2, 0, 1, 3)  # [R, Hkv, G, k]
            for step, values in enumerate(stored.later_values):
                output = output + shares[..., step : step + 1] * values.unsqueeze(2)
        out: torch.Tensor = self.o_proj(output.reshape(len(x), -1))
        return out
