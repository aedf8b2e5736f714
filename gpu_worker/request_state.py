"""What a rank remembers of each running sequence, by slot: tokens, length, pages, sampling. A leaf module.

All of it lives on the host, in numpy: a step gathers its few inputs there and moves three small arrays to the device.
"""

from __future__ import annotations

import itertools

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
        self.pages: Int64Array = np.zeros((num_slots, self.max_pages), dtype=np.int64)  # [S, P]
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
        counts = np.array([len(tokens) for tokens in token_ids], dtype=np.int64)
        places = self.num_tokens[slots]
        if len(slots) < counts.sum():
            behind = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            slots_of_tokens, places = np.repeat(slots, counts), np.repeat(places, counts) + behind
        else:
            slots_of_tokens = slots
        self.tokens[slots_of_tokens, places] = list(itertools.chain.from_iterable(token_ids))
        self.num_tokens[slots] += counts

    def set_pages(self, update: PageUpdate) -> None:
        """Takes over new logical pages of a slot."""
        first, stop = update.first_index, update.first_index + len(update.page_ids)
        self.pages[update.slot, first:stop] = update.page_ids
        self.num_pages[update.slot] = stop

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
        pages, offsets = np.divmod(positions, self.page_size)
        result: Int64Array = self.pages[slots, pages] * self.page_size + offsets
        return result

    def last_tokens(self, slots: Int64Array) -> Int64Array:
        """[r] the last known token of each slot."""
        return self.tokens[slots, self.num_tokens[slots] - 1]
