"""Step two of training: the serving implementation of the target reads the conversations; what it computed is kept.

Prefill only: whole conversations side by side in one forward pass, each in pages of its own, so nothing is padded.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.forward_batch import AttentionMetadata, ForwardBatch
from gpu_worker.models.base import CausalLM
from gpu_worker.training.conversations import Conversation, read_shard, shard_paths
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.features import (
    FeatureMeta,
    feature_path,
    features_source,
    law_rows,
    write_features,
)
from gpu_worker.transfers import to_device

_PAGE_SIZE = 16
_SPARE_BYTES = 1 << 30  # left free on the disk


@dataclass(frozen=True)
class ExtractProgress:
    """Told after each forward pass."""

    shard: int  # 0-based, of num_shards
    num_shards: int
    tokens: int  # since the start
    total_tokens: int  # of all shards that were missing at the start
    seconds: float


class Extractor:
    """Writes one feature shard per conversation shard; those of the same conversations are left alone."""

    def __init__(
        self,
        target: CausalLM,
        attention: AttentionBackend,
        meta: FeatureMeta,
        *,
        rows_per_pass: int = 2048,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        """rows_per_pass: tokens of one forward pass (a longer conversation runs alone)."""
        self._target = target
        self._attention = attention
        self._meta = meta
        self._rows_per_pass = rows_per_pass
        self._free_bytes = free_bytes

    def write(
        self,
        conversations: Path,
        directory: Path,
        report: Callable[[ExtractProgress], None] | None = None,
        begin: Callable[[int, int], None] | None = None,
    ) -> int:
        """Extracts every shard of `conversations` that `directory` lacks or has of other ones; the number of tokens.

        A prompt that came up before, in any shard, is left out. begin(tokens, bytes on the disk) is called first.
        Raises TrainingError, before anything is computed or written, where the disk has no room, and ModelError for
        conversations that are none of this target.
        """
        seen: set[bytes] = set()
        work: list[tuple[int, str, list[Conversation]]] = []
        for path in shard_paths(conversations):
            index = int(path.stem.rpartition("-")[2])
            fresh = list(self._fresh(path, seen))
            source = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
            if features_source(feature_path(directory, index)) not in (source, ""):
                work.append((index, source, fresh))
        every = [conversation for _, _, shard in work for conversation in shard]
        needed = self._room(every, directory)
        self._meta.write(directory)
        total = sum(len(conversation.token_ids) for conversation in every)
        if begin is not None:
            begin(total, needed)
        started, done = time.monotonic(), 0
        for number, (index, source, shard) in enumerate(work):

            def told(tokens: int, number: int = number, before: int = done) -> None:
                if report is not None:
                    seconds = time.monotonic() - started
                    report(ExtractProgress(number, len(work), before + tokens, total, seconds))

            write_features(feature_path(directory, index), self._shard(shard, told), source)
            done += sum(len(conversation.token_ids) for conversation in shard)
        return done

    def bytes_needed(self, conversations: Sequence[Conversation]) -> int:
        """What their features take on the disk."""
        tokens = sum(len(conversation.token_ids) for conversation in conversations)
        laws = sum(len(law_rows(conversation.answer_mask)) for conversation in conversations)
        return tokens * self._meta.bytes_per_token + laws * self._meta.bytes_per_law

    def _room(self, conversations: list[Conversation], directory: Path) -> int:
        """bytes_needed; raises TrainingError where the disk of `directory` lacks them."""
        there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        needed, free = self.bytes_needed(conversations), self._free_bytes(there)
        if needed + _SPARE_BYTES > free:
            raise TrainingError(
                f"{directory}: the features of {len(conversations)} conversations take {needed / 1e9:.2f} GB and"
                f" {_SPARE_BYTES / 1e9:.2f} GB must stay free; the disk has {free / 1e9:.2f} GB"
            )
        return needed

    def _fresh(self, path: Path, seen: set[bytes]) -> Iterator[Conversation]:
        """Conversations with an answer and a prompt that no earlier one had."""
        limit = self._target.config.max_position_embeddings
        for conversation in read_shard(path, self._meta.vocab_size):
            if not conversation.answers or len(conversation.token_ids) > limit:
                continue
            prompt = conversation.token_array[: conversation.num_prompt_tokens]
            digest = hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
            if digest not in seen:
                seen.add(digest)
                yield conversation

    def _shard(self, shard: list[Conversation], told: Callable[[int], None]) -> dict[str, torch.Tensor]:
        meta = self._meta
        lengths = [len(conversation.token_ids) for conversation in shard]
        masks = [conversation.answer_mask for conversation in shard]
        laws = [law_rows(mask) for mask in masks]
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        law_offsets = np.concatenate(([0], np.cumsum([len(rows) for rows in laws]))).astype(np.int64)
        n, m = int(offsets[-1]), int(law_offsets[-1])
        tensors = {
            "offsets": torch.from_numpy(offsets),
            "law_offsets": torch.from_numpy(law_offsets),
            "token_ids": torch.tensor([t for c in shard for t in c.token_ids], dtype=torch.int32),
            "answer": torch.from_numpy(np.concatenate(masks) if masks else np.zeros(0, np.uint8)),
            "hidden": torch.empty(n, meta.hidden_size, dtype=torch.bfloat16),
            "captured": torch.empty(n, meta.hidden_size * len(meta.feature_layers), dtype=torch.bfloat16),
            "top_ids": torch.empty(m, meta.top_k, dtype=torch.int32),
            "top_probs": torch.empty(m, meta.top_k, dtype=torch.float16),
        }
        pool = self._target.new_pool(self._pages_of_a_pass(lengths), _PAGE_SIZE)
        first = 0
        while first < len(shard):
            end, rows = first, 0
            while end < len(shard) and (end == first or rows + lengths[end] <= self._rows_per_pass):
                rows += lengths[end]
                end += 1
            batch = prefill_batch(
                [shard[i].token_ids for i in range(first, end)], _PAGE_SIZE, self._target.device
            )
            hidden, captured = self._target.forward_capturing(
                batch, pool, self._attention, meta.feature_layers
            )
            tensors["hidden"][offsets[first] : offsets[end]] = hidden
            if captured is not None:
                tensors["captured"][offsets[first] : offsets[end]] = captured
            kept = np.concatenate([laws[i] + offsets[i] - offsets[first] for i in range(first, end)])
            ids, probs = top_law(self._target, hidden[to_device(kept, hidden.device)], meta.top_k)
            tensors["top_ids"][law_offsets[first] : law_offsets[end]] = ids
            tensors["top_probs"][law_offsets[first] : law_offsets[end]] = probs
            first = end
            told(int(offsets[end]))
        return tensors

    def _pages_of_a_pass(self, lengths: list[int]) -> int:
        """Enough for any pass: each conversation may leave most of a page empty."""
        return -(-max([self._rows_per_pass, *lengths]) // _PAGE_SIZE) + len(lengths)


def prefill_batch(
    sequences: Sequence[Sequence[int]], page_size: int, device: torch.device | str, first_position: int = 0
) -> ForwardBatch:
    """One forward pass over whole sequences from `first_position` on, each in pages of its own from page 0 on."""
    counts = np.array([len(ids) for ids in sequences], dtype=np.int64)
    pages = -(-counts // page_size)
    page_indptr = np.concatenate(([0], np.cumsum(pages)))
    positions = np.concatenate([np.arange(count) for count in counts])
    slots = positions + np.repeat(page_indptr[:-1] * page_size, counts)
    return ForwardBatch(
        input_ids=to_device(np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sequences]), device),
        positions=to_device(positions + first_position, device),
        out_slots=to_device(slots, device),
        attention=AttentionMetadata(
            page_size=page_size,
            qo_indptr=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            kv_lens=counts.astype(np.int32),
            page_indptr=page_indptr.astype(np.int32),
            page_indices=np.arange(page_indptr[-1], dtype=np.int32),
            tree_masks=(None,) * len(sequences),
        ),
    )


def top_law(target: CausalLM, hidden: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [M, h] -> ids [M, k], best first, and their probabilities at temperature 1 [M, k] float32."""
    ids, logits, normalizer = target.output_head().topk(hidden, k)
    return ids, (logits - normalizer[:, None]).exp()
