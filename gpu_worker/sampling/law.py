"""The law p of the next token, as acceptance rules see it: few candidates or the whole vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gpu_worker.kernels.draws import MAX_DRAWS, gumbel_topk
from gpu_worker.kernels.native import ThreadTeam
from gpu_worker.sampling.random import keyed_gumbel

# A draft whose softmax over the noisy weights of the contenders is c turns out right in
# SURE_FACTOR * c ** SURE_EXPONENT of all cases: measured with an EAGLE-3 head at temperature 1, within 0.07 for any c.
# As in kernels/cpu/tree.cpp.
NUM_CONTENDERS, SURE_FACTOR, SURE_EXPONENT = 8, 0.75, 1.4


@dataclass(frozen=True)
class Law:
    """n laws over K candidates each; what is drawn from one does not depend on their order."""

    log_weights: torch.Tensor  # [n, K] float32, log p up to a constant per row; -inf: removed
    token_ids: torch.Tensor | None  # [n, K] int64 distinct per row; None: column c is token c
    team: ThreadTeam | None = None  # draws on the CPU kernels, bit for bit as torch would

    def select(self, rows: torch.Tensor) -> Law:
        """The laws of `rows` [m] int64."""
        ids = None if self.token_ids is None else self.token_ids[rows]
        return Law(self.log_weights[rows], ids, self.team)

    def draw(self, keys: torch.Tensor) -> torch.Tensor:
        """[n] int64: one token per row, argmax of log p + Gumbel noise under keys [n] int64.

        Noise is computed for candidates only: what truncation removed costs nothing.
        """
        return self.tokens_at(self._noisiest(keys, 1)[0][:, 0])

    def best(self, count: int, keys: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` candidates of largest weight, [n, count] ids and their log-probabilities, best first.

        With keys [n] each weight first gets the Gumbel noise that `draw` would add: the best is what it would draw. The
        log-probabilities then say how often a law close to this one draws the same under the same noise, judging by
        how far ahead of NUM_CONTENDERS others it is (SURE_FACTOR, SURE_EXPONENT).
        """
        count = min(count, self.log_weights.shape[1])
        if keys is None:
            values, columns = self.log_weights.topk(count, dim=-1)
            values = values - self.log_weights.logsumexp(dim=-1, keepdim=True)
        else:
            columns, values = self._noisiest(keys, min(max(count, NUM_CONTENDERS), self.log_weights.shape[1]))
            ahead = values - values.logsumexp(dim=-1, keepdim=True)
            columns = columns[:, :count]
            values = SURE_EXPONENT * ahead[:, :count] + math.log(SURE_FACTOR)
        ids = columns if self.token_ids is None else self.token_ids.gather(1, columns)
        return ids, values

    def _noisiest(self, keys: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns [n, count] with the largest log p + noise under keys [n] int64, and those sums, best first."""
        if self.team is not None and count <= MAX_DRAWS:
            return gumbel_topk(self.team, self.log_weights, keys, count, self.token_ids)
        ids = self.log_weights.shape[1] if self.token_ids is None else self.token_ids
        noisy = self.log_weights + keyed_gumbel(keys, ids)
        if count == 1:
            columns = noisy.argmax(dim=-1, keepdim=True)
            return columns, noisy.gather(1, columns)
        values, columns = noisy.topk(count, dim=-1)
        return columns, values

    def probabilities(self) -> torch.Tensor:
        """[n, K] float32, rows sum to 1; computed in float64, so that K does not change a value."""
        return torch.softmax(self.log_weights.to(torch.float64), dim=-1).to(torch.float32)

    def tokens_at(self, columns: torch.Tensor) -> torch.Tensor:
        """[n] token ids of one column [n] per row."""
        if self.token_ids is None:
            return columns
        return self.token_ids.gather(1, columns[:, None])[:, 0]

    def matches(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n, K] bool (or [1, K] rows): where the candidate is tokens[n]."""
        if self.token_ids is None:
            columns = torch.arange(self.log_weights.shape[1], device=tokens.device)
            return columns[None, :] == tokens[:, None]
        return self.token_ids == tokens[:, None]

    def at_candidates(self, values: torch.Tensor) -> torch.Tensor:
        """[n, K]: values [n, V] at each row's candidates."""
        return values if self.token_ids is None else values.gather(1, self.token_ids)

    def scatter(self, values: torch.Tensor, width: int) -> torch.Tensor:
        """[n, width]: values [n, K] at their token ids, zero elsewhere."""
        if self.token_ids is None:
            return values
        return values.new_zeros(values.shape[0], width).scatter_(1, self.token_ids, values)
