"""How often each drafting method is right, by depth and rank: measured while serving, per sequence and over all."""

from __future__ import annotations

import numpy as np

MAX_DEPTH = 16  # deeper nodes count as this deep
MAX_RANKS = 8  # worse ranked siblings count as the last of these


class SuccessRates:
    """Exponential averages of "this node was the token that came, its parent having been right".

    A sequence starts from the average over all sequences (the prior) and then follows its own.
    """

    def __init__(self, num_slots: int, num_parts: int, rate: float = 0.15, shared_rate: float = 0.02) -> None:
        """rate, shared_rate: weight of one more observation in a sequence's average and in the prior."""
        # A guess that lasts for a few dozen observations: every second best candidate is right, others less often.
        guess = 0.5 * 0.3 ** np.arange(MAX_RANKS)
        self._rate = rate
        self._shared_rate = shared_rate
        self._shared = np.broadcast_to(
            guess, (num_parts, MAX_DEPTH, MAX_RANKS)
        ).copy()  # [parts, depths, ranks]
        self._of_slots = np.broadcast_to(self._shared, (num_slots, *self._shared.shape)).copy()

    def admit(self, slot: int) -> None:
        """A new sequence: nothing is known of it yet but what holds for all."""
        self._of_slots[slot] = self._shared

    def rate(self, slot: int, part: int, depth: int, rank: int) -> float:
        """The estimate for a node at `depth` (1 behind the root) of the given rank among its siblings."""
        return float(self._of_slots[slot, part, min(depth, MAX_DEPTH) - 1, min(rank, MAX_RANKS - 1)])

    def reach(self, slot: int, part: int, least_value: float) -> int:
        """Levels down to which the part's best path is worth at least least_value; 0: not even its first node."""
        worth = np.cumprod(self._of_slots[slot, part, :, 0])
        return int((worth >= least_value).sum())

    def record(self, slot: int, part: int, depth: int, rank: int, right: bool) -> None:
        """One observation."""
        at = (part, min(depth, MAX_DEPTH) - 1, min(rank, MAX_RANKS - 1))
        self._of_slots[slot][at] += self._rate * (right - self._of_slots[slot][at])
        self._shared[at] += self._shared_rate * (right - self._shared[at])
