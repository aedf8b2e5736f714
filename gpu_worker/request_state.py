"""What a rank remembers of each running sequence, by slot: tokens, length, pages, sampling. A leaf module.

Token ids and page tables live on the device, so that a step gathers its inputs there; the host keeps numpy copies
for what it decides itself (n-gram lookup, results). On the CPU both are the same memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shared_mem.records import Admission, Int32Array, PageUpdate, SamplingRecord, SlotRelease

Int64Array = npt.NDArray[np.int64]


class RequestTable:
    """S slots of at most L tokens and P pages each; a slot belongs to the sequence that was admitted to it last."""

    def __init__(self, num_slots: int, max_context_tokens: int, page_size: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.max_context_tokens = max_context_tokens
        self.page_size = page_size
        self.max_pages = -(-(max_context_tokens + 1) // page_size)
        self.device = device
        self.tokens: Int64Array = np.zeros(
            (num_slots, max_context_tokens + 1), dtype=np.int64
        )  # host [S, L + 1]
        self.pages: Int64Array = np.zeros((num_slots, self.max_pages), dtype=np.int64)  # host [S, P]
        self.num_pages: Int64Array = np.zeros(num_slots, dtype=np.int64)
        self.num_tokens: Int64Array = np.zeros(num_slots, dtype=np.int64)  # known tokens, prompt + generated
        self.num_prompt_tokens: Int64Array = np.zeros(num_slots, dtype=np.int64)
        self.epochs: Int64Array = np.full(num_slots, -1, dtype=np.int64)
        self.sampling: list[SamplingRecord] = [SamplingRecord()] * num_slots
        self._shared = device.type == "cpu"
        self.device_tokens = (
            torch.from_numpy(self.tokens) if self._shared else torch.from_numpy(self.tokens).to(device)
        )
        self.device_pages = (
            torch.from_numpy(self.pages) if self._shared else torch.from_numpy(self.pages).to(device)
        )

    def admit(self, admission: Admission) -> None:
        """Gives the slot to a new sequence (or to one that was preempted) with all of its tokens so far."""
        slot, n = admission.slot, len(admission.token_ids)
        assert n <= self.max_context_tokens, "the scheduler admits only what fits the context"
        self.epochs[slot] = admission.epoch
        self.num_tokens[slot] = 0
        self.num_pages[slot] = 0
        self.num_prompt_tokens[slot] = admission.num_prompt_tokens
        self.sampling[slot] = admission.sampling
        self.append(slot, admission.token_ids)

    def append(self, slot: int, token_ids: Int32Array | list[int]) -> None:
        """Adds committed tokens behind the known ones."""
        start = int(self.num_tokens[slot])
        stop = start + len(token_ids)
        self.tokens[slot, start:stop] = token_ids
        self.num_tokens[slot] = stop
        if not self._shared:
            self.device_tokens[slot, start:stop] = torch.from_numpy(self.tokens[slot, start:stop]).to(
                self.device
            )

    def set_pages(self, update: PageUpdate) -> None:
        """Takes over new logical pages of a slot."""
        first, stop = update.first_index, update.first_index + len(update.page_ids)
        self.pages[update.slot, first:stop] = update.page_ids
        self.num_pages[update.slot] = stop
        if not self._shared:
            self.device_pages[update.slot, first:stop] = torch.from_numpy(
                self.pages[update.slot, first:stop]
            ).to(self.device)

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

    def kv_slots(self, slot: int, positions: torch.Tensor) -> torch.Tensor:
        """Pool slots (page * page_size + offset) of a sequence's token positions [T] (int64, on the device)."""
        return (
            self.device_pages[slot, positions // self.page_size] * self.page_size + positions % self.page_size
        )
