"""Acceptance offline: the serving head drafts greedily behind every answer token of greedy texts of the target.

A draft is right where it names the token that stands there, since that is what the target draws. Each start is a
sequence of its own that shares the conversation's full pages and has a copy of the last one, as a prefix cache would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.forward_batch import AttentionMetadata, ForwardBatch
from gpu_worker.kv_pool import PagedPool
from gpu_worker.models.base import CausalLM
from gpu_worker.models.heads.base import DraftHead, HeadRows
from gpu_worker.models.heads.config import HeadKind
from gpu_worker.models.heads.medusa import MedusaHeads
from gpu_worker.training.conversations import Conversation
from gpu_worker.training.extract import prefill_batch
from gpu_worker.transfers import to_device

_PAGE_SIZE = 16
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class OfflineAcceptance:
    """acceptance[k]: share of answer positions whose first k + 1 drafts are right."""

    acceptance: list[float]
    starts: int
    acceptance_length: float  # tokens of a verify step, walking through each answer as a server would
    first_token_loss: float  # -log of the head's probability of the next token, over the draft vocabulary


@dataclass
class _Tally:
    right: Int64Array  # per position
    starts: int = 0
    steps: int = 0
    tokens: int = 0
    loss: float = 0.0
    losses: int = 0


class OfflineEvaluator:
    """One head beside its target; conversations one at a time."""

    def __init__(
        self,
        target: CausalLM,
        head: DraftHead | MedusaHeads,
        attention: AttentionBackend,
        depth: int,
    ) -> None:
        """depth: draft tokens of a chain; of Medusa at most one for each head."""
        self._target, self._head, self._attention = target, head, attention
        self._depth = depth
        ids = head.token_ids
        self._columns = None
        if ids is not None:
            self._columns = torch.full((target.config.vocab_size,), -1, device=ids.device)
            self._columns[ids] = torch.arange(len(ids), device=ids.device)

    def measure(self, conversations: Sequence[Conversation]) -> OfflineAcceptance:
        """Over the greedy answers of `conversations`."""
        tally = _Tally(np.zeros(self._depth, np.int64))
        for conversation in conversations:
            if conversation.greedy:
                self._conversation(conversation, tally)
        return OfflineAcceptance(
            (tally.right / max(1, tally.starts)).tolist(),
            tally.starts,
            tally.tokens / max(1, tally.steps),
            tally.loss / max(1, tally.losses),
        )

    def _conversation(self, conversation: Conversation, tally: _Tally) -> None:
        config, device = self._head.config, self._target.device
        ids = torch.tensor(conversation.token_ids, device=device)
        batch = prefill_batch([conversation.token_ids], _PAGE_SIZE, device)
        pages = -(-len(ids) // _PAGE_SIZE)
        hidden, captured = self._target.forward_capturing(
            batch,
            self._target.new_pool(pages, _PAGE_SIZE),
            self._attention,
            config.hidden_layers(self._target.num_layers),
        )
        # A start is a token of an answer that the target has just drawn, with at least one more behind it.
        starts = torch.tensor(
            [i for first, stop in conversation.answers for i in range(first, stop - 1)],
            dtype=torch.int64,
            device=device,
        )
        if not len(starts):
            return
        if config.kind is HeadKind.MEDUSA:
            drafts = self._medusa_drafts(cast(MedusaHeads, self._head), hidden[starts - 1])
        else:
            head = cast(DraftHead, self._head)
            features = hidden if captured is None else captured
            drafts, normed = self._chains(head, conversation, features, starts)
            self._add_loss(head, normed, ids[starts + 1], tally)
        self._count(conversation, starts, drafts, tally)

    def _chains(
        self, head: DraftHead, conversation: Conversation, features: torch.Tensor, starts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(drafted target ids [S, depth], what the output head read for the first of them [S, h])."""
        # The first token has no state before it: heads see zeros in its place, or never see it.
        skipped = 0 if head.config.attends_first_slot else 1
        shifted = torch.zeros_like(features)
        shifted[1:] = features[:-1]
        batch = prefill_batch([conversation.token_ids[skipped:]], _PAGE_SIZE, head.device, skipped)
        shared = batch.attention.page_indptr[-1]
        private = -(-self._depth // _PAGE_SIZE) + 1  # pages of each start
        pool = head.new_pool(int(shared) + len(starts) * private, _PAGE_SIZE)
        rows = head.forward(batch, shifted[skipped:], pool, self._attention, recycled=False)
        state = rows.select(starts - skipped)
        lengths = starts.cpu().numpy() + 1 - skipped  # pairs that are stored for each start
        full = lengths // _PAGE_SIZE
        own = int(shared) + np.arange(len(starts)) * private  # first page that is the start's alone
        self._copy_last_pages(pool, head.device, lengths, full, own)
        drafted = [self._ids(head, head.output.argmax(state.normed))]
        first = state.normed
        for step in range(1, self._depth):
            state = self._draft_step(head, pool, drafted[-1], state, lengths + step - 1, full, own)
            drafted.append(self._ids(head, head.output.argmax(state.normed)))
        return torch.stack(drafted, dim=1), first

    def _draft_step(
        self,
        head: DraftHead,
        pool: PagedPool,
        ids: torch.Tensor,
        state: HeadRows,
        index: Int64Array,
        full: Int64Array,
        own: Int64Array,
    ) -> HeadRows:
        """One pair for each start, at `index` of its sequence."""
        num_pages = index // _PAGE_SIZE + 1
        indptr = np.concatenate(([0], np.cumsum(num_pages))).astype(np.int32)
        pages = [
            np.concatenate((np.arange(shared), first + np.arange(count - shared)))
            for shared, first, count in zip(full, own, num_pages, strict=True)
        ]
        slots = (own + index // _PAGE_SIZE - full) * _PAGE_SIZE + index % _PAGE_SIZE
        batch = ForwardBatch(
            input_ids=ids,
            positions=to_device(index if head.config.attends_first_slot else index + 1, head.device),
            out_slots=to_device(slots, head.device),
            attention=AttentionMetadata(
                page_size=_PAGE_SIZE,
                qo_indptr=np.arange(len(index) + 1, dtype=np.int32),
                kv_lens=(index + 1).astype(np.int32),
                page_indptr=indptr,
                page_indices=np.concatenate(pages).astype(np.int32),
                tree_masks=(None,) * len(index),
            ),
        )
        return head.forward(batch, state.recycled, pool, self._attention, recycled=True)

    def _copy_last_pages(
        self,
        pool: PagedPool,
        device: torch.device,
        lengths: Int64Array,
        full: Int64Array,
        own: Int64Array,
    ) -> None:
        counts = lengths - full * _PAGE_SIZE
        offsets = np.concatenate([np.arange(count) for count in counts])
        source = np.repeat(full * _PAGE_SIZE, counts) + offsets
        target = np.repeat(own * _PAGE_SIZE, counts) + offsets
        if len(source):
            pool.move(to_device(source, device), to_device(target, device))

    def _medusa_drafts(self, heads: MedusaHeads, hidden: torch.Tensor) -> torch.Tensor:
        normed = heads.forward(hidden, min(self._depth, len(heads.outputs)))  # [S, heads, h]
        columns = [
            output.argmax(normed[:, k].contiguous())
            for k, output in enumerate(heads.outputs[: normed.shape[1]])
        ]
        return torch.stack([self._ids(heads, column) for column in columns], dim=1)

    def _add_loss(self, head: DraftHead, normed: torch.Tensor, wanted: torch.Tensor, tally: _Tally) -> None:
        columns = wanted if self._columns is None else self._columns[wanted]
        known = columns >= 0
        if known.any():
            logits = head.output.logits(normed[known].contiguous())
            tally.loss += float(torch.nn.functional.cross_entropy(logits, columns[known], reduction="sum"))
            tally.losses += int(known.sum())

    def _ids(self, head: DraftHead | MedusaHeads, columns: torch.Tensor) -> torch.Tensor:
        return columns if head.token_ids is None else head.token_ids[columns]

    def _count(
        self, conversation: Conversation, starts: torch.Tensor, drafts: torch.Tensor, tally: _Tally
    ) -> None:
        accepted: dict[int, int] = {}
        for start, drafted in zip(starts.tolist(), drafts.tolist(), strict=True):
            stop = next(b for a, b in conversation.answers if a <= start < b)
            wanted = conversation.token_ids[start + 1 : min(stop, start + 1 + len(drafted))]
            count = 0
            while count < len(wanted) and wanted[count] == drafted[count]:
                count += 1
            accepted[start] = count
            tally.right[:count] += 1
            tally.starts += 1
        for first, stop in conversation.answers:
            at = first
            while at < stop - 1:
                tokens = min(accepted[at] + 1, stop - 1 - at)  # no token of its own behind the answer's last
                tally.steps += 1
                tally.tokens += tokens
                at += tokens
