"""How a head's output becomes draft tokens: the best id, a draw under the request's own rule, or the best children."""

from __future__ import annotations

import torch

from gpu_worker.models.base import OutputHead
from gpu_worker.models.heads.base import target_ids
from gpu_worker.sampling.sampler import PlainDraws, Sampler


class ChoiceOfDrafts:
    """Greedy requests without adjustments never see logits; for the others the draft vocabulary is spread out."""

    def __init__(
        self, output: OutputHead, token_ids: torch.Tensor | None, vocab_size: int, sampler: Sampler
    ) -> None:
        """token_ids [columns of output] int64: the target's id of each; None: its own number. vocab_size: target's."""
        self._output = output
        self._token_ids = token_ids
        self._vocab_size = vocab_size
        self._sampler = sampler

    def takes_best(self, slots: list[int]) -> bool:
        """Whether all of these slots take the head's best id as it is."""
        return self._sampler.proposes_best(slots)

    def plain(self, slots: list[int]) -> PlainDraws | None:
        """See Sampler.plain_draws."""
        return self._sampler.plain_draws(slots)

    def best(
        self, normed: torch.Tensor, slots: list[int], positions: list[int], drafted: list[list[int]]
    ) -> tuple[list[int], torch.Tensor | None]:
        """The draft token behind each row of normed [M, h] and the law it was drawn from: see Sampler.propose."""
        if self.takes_best(slots):
            return target_ids(self._token_ids, self._output.argmax(normed)).tolist(), None
        return self._sampler.propose(self._logits(normed), slots, positions, drafted)

    def draws_plainly(self, slot: int) -> bool:
        """See Sampler.draws_plainly."""
        return self._sampler.draws_plainly(slot)

    def best_unread(self, normed: torch.Tensor, slots: list[int], positions: torch.Tensor) -> torch.Tensor:
        """[M] int64: `best` for slots that draw plainly, at positions [M] int64; all of it stays on the device."""
        if self.takes_best(slots):
            return target_ids(self._token_ids, self._output.argmax(normed))
        return self._sampler.propose_unread(self._logits(normed), slots, positions)

    def children(
        self,
        normed: torch.Tensor,
        slots: list[int],
        positions: list[int],
        drafted: list[list[int]],
        count: int,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """For each row the `count` ids that the target is most likely to draw next, with their log-probabilities."""
        count = min(count, self._output.num_columns)
        if self.takes_best(slots):
            columns, logits, normaliser = self._output.topk(normed, count)
            return target_ids(self._token_ids, columns).tolist(), (logits - normaliser[:, None]).tolist()
        ids, values = self._sampler.propose_children(self._logits(normed), slots, positions, drafted, count)
        return ids.tolist(), values.tolist()

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[M, V] float32 over the target's ids; what the head cannot draft is -inf."""
        logits = self._output.logits(normed)
        if self._token_ids is None:
            return logits
        full = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        return full.index_copy_(1, self._token_ids, logits)
