"""What a rank remembers of each running sequence, by slot: tokens, length, pages, sampling. A leaf module.

All of it lives on the host, in numpy: a step gathers its few inputs there and moves three small arrays to the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from shared_mem.records import Admission, PageUpdate, SamplingRecord, SlotRelease

Int64Array = npt.NDArray[np.int64]


class RequestTable:
    """S slots of at most L tokens and P pages each; a slot belongs to the sequence that was admitted to it last."""

    def __init__(self, num_slots: int, max_context_tokens: int, page_size: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.max_context_tokens = max_context_tokens
        self.page_size = page_size
        self.max_pages = -(-(max_context_tokens + 1) // page_size)
        self.device = device
        self.tokens: Int64Array = np.zeros((num_slots, max_context_tokens + 1), dtype=np.int64)  # [S, L + 1]
        self.pages: npt.NDArray[np.int32] = np.zeros((num_slots, self.max_pages), dtype=np.int32)  # [S, P]
        # What follows from pages, kept ready because every step asks for it: the pool slot of each token position.
        self._kv_slots: Int64Array = np.zeros((num_slots, self.max_pages * page_size), dtype=np.int64)
        self._positions: Int64Array = np.arange(self.max_pages * page_size, dtype=np.int64)
        self.num_pages: Int64Array = np.zeros(num_slots, dtype=np.int64)
        self.num_tokens: Int64Array = np.zeros(num_slots, dtype=np.int64)  # known tokens, prompt + generated
        self.num_prompt_tokens: Int64Array = np.zeros(num_slots, dtype=np.int64)
        self.epochs: Int64Array = np.full(num_slots, -1, dtype=np.int64)
        self.sampling: list[SamplingRecord] = [SamplingRecord()] * num_slots

    def admit(self, admission: Admission) -> None:
        """Gives the slot to a new sequence (or to one that was preempted) with all of its tokens so far."""
        slot, n = admission.slot, len(admission.token_ids)
        assert n <= self.max_context_tokens, "the scheduler admits only what fits the context"
        self.epochs[slot] = admission.epoch
        self.num_tokens[slot] = n
        self.num_pages[slot] = 0
        self.num_prompt_tokens[slot] = admission.num_prompt_tokens
        self.sampling[slot] = admission.sampling
        self.tokens[slot, :n] = admission.token_ids

    def append_each(self, slots: Int64Array, token_ids: list[list[int]]) -> None:
        """Adds committed tokens behind the known ones: token_ids[r] to slots[r] (distinct slots)."""
        for slot, tokens in zip(slots.tolist(), token_ids, strict=True):
            first = int(self.num_tokens[slot])
            end = first + len(tokens)
            assert end <= self.tokens.shape[1], "the scheduler ends sequences at the context limit"
            self.tokens[slot, first:end] = tokens
            self.num_tokens[slot] = end

    def set_pages(self, update: PageUpdate) -> None:
        """Takes over new logical pages of a slot."""
        first, stop = update.first_index, update.first_index + len(update.page_ids)
        self.pages[update.slot, first:stop] = update.page_ids
        self.num_pages[update.slot] = stop
        size = self.page_size
        starts = np.asarray(update.page_ids, dtype=np.int64) * size
        self._kv_slots[update.slot, first * size : stop * size] = np.add.outer(
            starts, np.arange(size)
        ).reshape(-1)

    def release(self, release: SlotRelease) -> None:
        """Forgets a sequence."""
        self.epochs[release.slot] = -1
        self.num_tokens[release.slot] = 0
        self.num_pages[release.slot] = 0

    def known(self, slot: int) -> Int64Array:
        """[n] the slot's tokens, prompt and generated (a view)."""
        return self.tokens[slot, : int(self.num_tokens[slot])]

    def capacity(self, slot: int) -> int:
        """Token slots that the sequence's pages hold."""
        return int(self.num_pages[slot]) * self.page_size

    def kv_slots(self, slots: int | Int64Array, positions: Int64Array) -> Int64Array:
        """Pool slots (page * page_size + offset) of token positions [T] of one sequence, or of slots [T]."""
        result: Int64Array = self._kv_slots[slots, positions]
        return result

    def kv_run(self, slot: int, first: int, count: int) -> Int64Array:
        """[count] kv_slots of the positions first, first + 1, ... of one sequence (a view; do not write to it)."""
        return self._kv_slots[slot, first : first + count]

    def position_run(self, first: int, count: int) -> Int64Array:
        """[count] the positions first, first + 1, ... (a view; do not write to it)."""
        return self._positions[first : first + count]

    def last_tokens(self, slots: Sequence[int]) -> list[int]:
        """The last known token of each slot."""
        return [int(self.tokens[slot, self.num_tokens[slot] - 1]) for slot in slots]
