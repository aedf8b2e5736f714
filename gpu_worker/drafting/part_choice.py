"""Which drafting methods a portfolio asks: those whose drafts are worth the time that they take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class PartChoice:
    """Measures, for every set of parts, how many draft tokens it would have got right, and what its parts cost.

    A set is a bit mask. What a part adds depends on who is asked beside it: heads that read the same hidden states
    mostly agree, so single parts' rates do not add up, and sets are measured as such. A step with all parts judges all
    sets at once. Asked are, of the sets with the part that is right most often over all sequences, the one with the
    most tokens per time.
    """

    def __init__(self, num_slots: int, num_parts: int, rate: float = 0.05, shared_rate: float = 0.02) -> None:
        """rate, shared_rate: weight of one more step in a sequence's averages and in those over all sequences."""
        sets = np.arange(1 << num_parts)
        self._sets = sets
        self._singles = 1 << np.arange(num_parts)
        self._members = (sets[:, None] & self._singles > 0).astype(np.float64)  # [sets, parts]
        self._rate, self._shared_rate = rate, shared_rate
        self._of_slots = np.zeros((num_slots, len(sets)))  # right draft tokens per step
        self._shared = np.zeros(len(sets))
        self._num_steps = 0
        self._times = np.zeros(num_parts)  # seconds of a part's drafting
        self._num_timed = np.zeros(num_parts, dtype=np.int64)
        self._rest, self._num_rests = 0.0, 0  # seconds of a step's other work

    @property
    def everyone(self) -> int:
        """The set of all parts."""
        return len(self._sets) - 1

    def admit(self, slot: int) -> None:
        """A new sequence: nothing is known of it yet but what holds for all."""
        self._of_slots[slot] = self._shared

    def best(self, slot: int) -> int:
        """The parts to ask for a slot, as a bit mask; more of them where that costs nothing."""
        first = self._singles[int(np.argmax(self._shared[self._singles]))]
        eligible = self._sets[self._sets & first > 0][::-1]
        times = self._rest + self._members[eligible] @ self._times
        # Before anything was timed, tokens alone count.
        speeds = (1.0 + self._of_slots[slot, eligible]) / np.maximum(times, 1e-9)
        return int(eligible[np.argmax(speeds)])

    def record(self, slot: int, asked: int, proposers: Sequence[int]) -> None:
        """What a step showed: of each right token in turn, the set of parts that proposed it.

        A set that was asked in part moves as that part of it does: what the others add is taken to last. So sets stay
        comparable, though they are measured in different steps.
        """
        lengths, reached = np.zeros(len(self._sets)), np.ones(len(self._sets), dtype=np.bool_)
        for mask in proposers:
            reached &= self._sets & mask > 0
            lengths += reached
        seen = self._sets & asked
        self._num_steps += 1
        for averages, rate in ((self._of_slots[slot], self._rate), (self._shared, self._shared_rate)):
            averages += max(rate, 1.0 / self._num_steps) * (lengths[seen] - averages[seen])

    def record_time(self, part: int, seconds: float) -> None:
        """How long a part drafted in a step."""
        self._num_timed[part] += 1
        weight = max(self._shared_rate, 1.0 / int(self._num_timed[part]))
        self._times[part] += weight * (seconds - self._times[part])

    def record_rest(self, seconds: float) -> None:
        """How long a step's other work took."""
        self._num_rests += 1
        self._rest += max(self._shared_rate, 1.0 / self._num_rests) * (seconds - self._rest)
