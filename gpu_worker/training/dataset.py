"""The extracted conversations as training and validation batches of about equal work, in an order that a seed fixes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.training.batches import DraftVocabulary, TrainingBatch, collate
from gpu_worker.training.eagle_from_mtp import InputSizes
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.features import FeatureMeta, FeatureShard
from gpu_worker.training.seen_text import SeenText

HELD_OUT_THOUSANDTHS = 20


@dataclass(frozen=True)
class Item:
    """Where a conversation lies and how large it is."""

    shard: int
    index: int
    num_tokens: int
    num_rows: int


def is_held_out(token_ids: npt.NDArray[np.int32], thousandths: int = HELD_OUT_THOUSANDTHS) -> bool:
    """Whether a conversation is kept for validation: by its own tokens, so that more data moves none across."""
    digest = hashlib.blake2b(token_ids.astype(np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 1000 < thousandths


class FeatureDataset:
    """All conversations of some shards. Whether one is held out depends on its tokens alone, not on the others.

    Held-out ones that repeat what training learns would flatter a head: they are left out of `held_out` and counted in
    `num_repeating`.
    """

    def __init__(
        self,
        directory: Path,
        paths: Sequence[Path],
        *,
        hidden: bool,
        captured: bool,
        held_out_thousandths: int = HELD_OUT_THOUSANDTHS,
        max_tokens: int = 4096,
    ) -> None:
        """hidden, captured: what is read. Conversations of more than max_tokens tokens are left out."""
        self.meta = FeatureMeta.read(directory)
        self._hidden, self._captured = hidden, captured
        self._shards = [FeatureShard(path) for path in paths]
        self.training: list[Item] = []
        held_out: list[Item] = []
        for number, shard in enumerate(self._shards):
            for index in range(shard.num_conversations):
                first, end = int(shard.offsets[index]), int(shard.offsets[index + 1])
                item = Item(number, index, end - first, shard.num_law_rows(index))
                if not item.num_rows or item.num_tokens > max_tokens:
                    continue
                held = is_held_out(shard.token_ids[first:end], held_out_thousandths)
                (held_out if held else self.training).append(item)
        if not self.training:
            raise TrainingError(f"{directory}: no conversation to train on in {len(paths)} shards")
        seen = SeenText(map(self._text, self.training))
        self.held_out = [item for item in held_out if not seen.repeats(*self._text(item))]
        self.num_repeating = len(held_out) - len(self.held_out)

    def _text(self, item: Item) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """token_ids and answer, each [T]."""
        shard = self._shards[item.shard]
        first, end = int(shard.offsets[item.index]), int(shard.offsets[item.index + 1])
        return shard.token_ids[first:end], shard.answer[first:end]

    def answer_counts(self) -> torch.Tensor:
        """[vocab_size] how often each id stands in an answer."""
        counts = np.zeros(self.meta.vocab_size, dtype=np.int64)
        for shard in self._shards:
            counts += np.bincount(shard.token_ids[shard.answer == 1], minlength=len(counts))
        return torch.from_numpy(counts)

    def feature_sizes(self, conversations: int = 64) -> torch.Tensor:
        """[n*h] root mean square of each captured feature. First tokens are left out: targets park attention there,
        with values far from all others."""
        squares, count = torch.zeros(self.meta.hidden_size * len(self.meta.feature_layers)), 0
        for item in self.training[:conversations]:
            captured = self._shards[item.shard].read(item.index, hidden=False, captured=True).captured
            assert captured is not None
            squares += captured[1:].float().square().sum(0)
            count += len(captured) - 1
        return (squares / max(1, count)).sqrt().clamp_min(1e-4)

    def input_sizes(self, embedding: torch.Tensor, conversations: int = 64) -> InputSizes:
        """Mean root mean squares of the tokens' rows of embedding [V, h] and of the target's hidden states."""
        embedded, hidden = [], []
        for item in self.training[:conversations]:
            read = self._shards[item.shard].read(item.index, hidden=True, captured=False)
            assert read.hidden is not None
            embedded.append(embedding[read.token_ids].float().square().mean(1).sqrt())
            hidden.append(read.hidden.float().square().mean(1).sqrt())
        return InputSizes(float(torch.cat(embedded).mean()), float(torch.cat(hidden).mean()))

    def epoch(self, number: int, seed: int, rows_per_batch: int) -> list[list[Item]]:
        """The batches of one pass over the training conversations, shuffled."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        order = torch.randperm(len(self.training), generator=generator).tolist()
        return _packed([self.training[i] for i in order], rows_per_batch)

    def validation(self, rows_per_batch: int, max_rows: int) -> list[list[Item]]:
        """Batches of held-out conversations, at most about max_rows law rows in all; always the same ones."""
        chosen, rows = [], 0
        for item in self.held_out:
            if rows >= max_rows:
                break
            chosen.append(item)
            rows += item.num_rows
        return _packed(chosen, rows_per_batch)

    def load(self, items: Sequence[Item], vocabulary: DraftVocabulary, dtype: torch.dtype) -> TrainingBatch:
        """Reads a batch from the shards."""
        read = [
            self._shards[item.shard].read(item.index, hidden=self._hidden, captured=self._captured)
            for item in items
        ]
        return collate(read, vocabulary, dtype, from_captured=self._captured)


def _packed(items: Sequence[Item], rows_per_batch: int) -> list[list[Item]]:
    """Consecutive items, as many as have rows_per_batch law rows, in each batch."""
    batches: list[list[Item]] = []
    rows = rows_per_batch
    for item in items:
        if rows >= rows_per_batch:
            batches.append([])
            rows = 0
        batches[-1].append(item)
        rows += item.num_rows
    return batches
