"""Several conversations laid end to end as one training batch: no padding, and drafts only where there is a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.training.features import ConversationFeatures
from gpu_worker.transfers import to_device


@dataclass(frozen=True)
class Span:
    """One conversation within a batch: its tokens and its law rows, both as [first, end)."""

    first_token: int
    end_token: int
    first_row: int
    end_row: int


@dataclass(frozen=True)
class TrainingBatch:
    """N tokens of several conversations; R law rows, those whose next token belongs to an answer.

    Row i pairs a token with what the target computed for the token before it, so `features` are shifted by one:
    zeros stand before a conversation's first token.
    """

    token_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64, within the conversation
    features: torch.Tensor  # [N, F] compute dtype, shifted
    spans: tuple[Span, ...]
    rows: torch.Tensor  # [R] int64, indices of tokens
    # [R] on the host, how many law rows follow without a gap: step k has a target where room >= k
    room: npt.NDArray[np.int64]
    columns: torch.Tensor  # [R, k] int64, the law's ids as draft ids; 0 where the draft vocabulary lacks one
    probs: torch.Tensor  # [R, k] float32; 0 where the draft vocabulary lacks the id
    hidden: torch.Tensor | None  # [R, h] compute dtype: what the target computed for the row's own token

    @property
    def num_positions(self) -> int:
        """Of the longest conversation."""
        return max(span.end_token - span.first_token for span in self.spans)

    def rows_with_target(self, ahead: int) -> torch.Tensor:
        """[n] int64: the law rows that the one `ahead` rows further on is a target of. Nothing is read back."""
        return to_device(np.flatnonzero(self.room >= ahead), self.rows.device)

    def to(self, device: torch.device) -> TrainingBatch:
        """The batch with its tensors on `device`."""
        tensors: dict[str, Any] = {
            name: to_device(value, device)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class DraftVocabulary:
    """The ids that a head may draft."""

    ids: torch.Tensor  # [V] int64, ascending
    columns: torch.Tensor  # [vocab_size] int64, -1 for an id that is not among them

    @classmethod
    def of(cls, ids: torch.Tensor, vocab_size: int) -> DraftVocabulary:
        """ids [V] int64, ascending."""
        columns = torch.full((vocab_size,), -1)
        columns[ids] = torch.arange(len(ids))
        return cls(ids, columns)

    @classmethod
    def most_frequent(
        cls, counts: torch.Tensor, size: int, kept: torch.Tensor | None = None
    ) -> DraftVocabulary:
        """The `size` likeliest ids by counts [vocab_size]; all of them if size is the vocabulary's.

        Of equally frequent ids the lower ones: a tokenizer that learned by merging numbered the more frequent first.
        kept [V] int64: ids that are among them in any case, all of them however small `size` is.
        """
        if kept is not None:
            counts, size = counts.clone(), max(size, len(kept))
            counts[kept] = counts.sum() + 1  # ahead of all others
        ids = counts.argsort(descending=True, stable=True)[:size].sort().values
        return cls.of(ids, len(counts))

    @property
    def size(self) -> int:
        return len(self.ids)


def collate(
    conversations: Sequence[ConversationFeatures],
    vocabulary: DraftVocabulary,
    dtype: torch.dtype,
    *,
    from_captured: bool,
) -> TrainingBatch:
    """Lays conversations end to end. from_captured: the head reads the captured layers, not the last hidden state.

    What was not read of the conversations has no features (a draft model needs none).
    """
    spans: list[Span] = []
    features: list[torch.Tensor] = []
    hidden: list[torch.Tensor] = []
    rooms: list[torch.Tensor] = []
    tokens = rows = 0
    for item in conversations:
        length, count = len(item.token_ids), len(item.rows)
        spans.append(Span(tokens, tokens + length, rows, rows + count))
        source = item.captured if from_captured else item.hidden
        shifted = torch.zeros(length, 0 if source is None else source.shape[1], dtype=dtype)
        if source is not None:
            shifted[1:] = source[:-1]
        features.append(shifted)
        if item.hidden is not None:
            hidden.append(item.hidden[item.rows].to(dtype))
        rooms.append(_room(item.rows))
        tokens, rows = tokens + length, rows + count
    columns = vocabulary.columns[torch.cat([item.top_ids for item in conversations])]
    known = columns >= 0
    return TrainingBatch(
        token_ids=torch.cat([item.token_ids for item in conversations]),
        positions=torch.cat([torch.arange(len(item.token_ids)) for item in conversations]),
        features=torch.cat(features),
        spans=tuple(spans),
        rows=torch.cat(
            [item.rows + span.first_token for item, span in zip(conversations, spans, strict=True)]
        ),
        room=torch.cat(rooms).numpy(),
        columns=columns.clamp_min(0),
        probs=torch.cat([item.top_probs for item in conversations]) * known,
        hidden=torch.cat(hidden) if hidden else None,
    )


def _room(rows: torch.Tensor) -> torch.Tensor:
    """For ascending rows [M]: how many of them follow each without a gap."""
    count = len(rows)
    order = torch.arange(count)
    ends = torch.ones(count, dtype=torch.bool)  # the last row of each run
    ends[:-1] = rows[1:] != rows[:-1] + 1
    last = torch.where(ends, order, count).flip(0).cummin(0).values.flip(0)  # the run's end, for each row
    return last - order
