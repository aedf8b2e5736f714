"""What sampling remembers of each slot: its parameters, and penalty counts where it uses penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.transfers import to_device
from shared_mem.enums import AcceptanceRule
from shared_mem.records import SamplingRecord

Int64Array = npt.NDArray[np.int64]

_PARAMETERS = np.dtype(
    [
        ("seed", np.int64),  # the bits of the record's uint64
        ("num_prompt_tokens", np.int64),
        ("min_tokens", np.int64),
        ("top_k", np.int64),
        ("num_logprobs", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("typical_epsilon", np.float32),
        ("typical_delta", np.float32),
        ("threshold", np.float32),
        ("rule", np.int64),
        ("greedy", np.bool_),
        ("truncates", np.bool_),
        ("adjusts", np.bool_),  # penalties, bias or min_tokens: the logits themselves change
    ],
    align=True,
)

_BY_BOUND = (AcceptanceRule.TYPICAL, AcceptanceRule.THRESHOLD)


def to_tensor(column: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A device copy of an array, which may be one field of a structured array."""
    return to_device(column.copy(), device)


@dataclass(frozen=True)
class Penalties:
    """Penalty factors of one slot and the committed tokens they act on."""

    repetition: float
    presence: float
    frequency: float
    in_prompt: torch.Tensor  # [V] bool
    output_counts: torch.Tensor  # [V] float32, generated tokens only (exact up to 2 ** 24)


class SlotStates:
    """Parameters of all slots as columns (`parameters[slots]["temperature"]`), the rest by slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.parameters = np.zeros(num_slots, dtype=_PARAMETERS)
        # Slots of which more than the best id matters: drawn at random, adjusted or with log-probabilities.
        self.needs_logits: set[int] = set()
        # Slots whose drafts are more than the draft's best id: drawn at random, or from adjusted logits.
        self.draws_drafts: set[int] = set()
        # Of these the ones whose drafts are more than the best of log q + coupled noise.
        self.draws_otherwise: set[int] = set()
        self.penalties: dict[int, Penalties] = {}
        self.bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # ids [b] int64, values [b] float32
        self.end_ids: dict[int, torch.Tensor] = {}  # [e] int64, only where min_tokens bans them
        self._vocab_size = vocab_size
        self._device = device

    def admit(
        self,
        slot: int,
        record: SamplingRecord,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        num_prompt: int,
    ) -> None:
        """Takes over a sequence: token_ids [n] are its prompt and, after a preemption, what was generated."""
        self.release(slot)
        penalised = (
            record.repetition_penalty != 1.0
            or record.presence_penalty != 0.0
            or record.frequency_penalty != 0.0
        )
        bans_ends = record.min_tokens > 0 and len(record.end_ids) > 0
        adjusts = penalised or bool(record.logit_bias) or bans_ends
        self.parameters[slot] = (
            np.uint64(record.seed).astype(np.int64),
            num_prompt,
            record.min_tokens,
            record.top_k if 0 < record.top_k < self._vocab_size else 0,
            record.num_logprobs,
            record.temperature,
            record.top_p,
            record.min_p,
            record.typical_epsilon,
            record.typical_delta,
            record.threshold,
            int(AcceptanceRule(record.acceptance_rule)),
            record.temperature <= 0,
            0 < record.top_k < self._vocab_size or record.top_p < 1 or record.min_p > 0,
            adjusts,
        )
        if record.temperature > 0 or adjusts or record.num_logprobs >= 0:
            self.needs_logits.add(slot)
        if adjusts or (record.temperature > 0 and record.acceptance_rule not in _BY_BOUND):
            self.draws_drafts.add(slot)
            coupled = record.acceptance_rule == AcceptanceRule.COUPLED
            if adjusts or not coupled or self.parameters[slot]["truncates"]:
                self.draws_otherwise.add(slot)
        if penalised:
            tokens = torch.as_tensor(np.asarray(token_ids, dtype=np.int64), device=self._device)
            in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            in_prompt[tokens[:num_prompt]] = True
            self.penalties[slot] = Penalties(
                repetition=record.repetition_penalty,
                presence=record.presence_penalty,
                frequency=record.frequency_penalty,
                in_prompt=in_prompt,
                output_counts=torch.zeros(self._vocab_size, device=self._device),
            )
            self.commit(slot, tokens[num_prompt:])
        if record.logit_bias:
            ids, values = zip(*record.logit_bias, strict=True)
            self.bias[slot] = (
                torch.tensor(ids, dtype=torch.int64, device=self._device),
                torch.tensor(values, dtype=torch.float32, device=self._device),
            )
        if bans_ends:
            self.end_ids[slot] = torch.tensor(record.end_ids, dtype=torch.int64, device=self._device)

    def release(self, slot: int) -> None:
        """Forgets the slot's sequence; a slot that holds none is left as it is."""
        self.needs_logits.discard(slot)
        self.draws_drafts.discard(slot)
        self.draws_otherwise.discard(slot)
        self.penalties.pop(slot, None)
        self.bias.pop(slot, None)
        self.end_ids.pop(slot, None)

    def commit(self, slot: int, token_ids: Sequence[int] | torch.Tensor) -> None:
        """Counts generated tokens, each occurrence once."""
        penalties = self.penalties.get(slot)
        if penalties is None or len(token_ids) == 0:
            return
        tokens = torch.as_tensor(token_ids, dtype=torch.int64, device=self._device)
        ones = penalties.output_counts.new_ones(len(tokens))
        penalties.output_counts.index_add_(0, tokens, ones)
