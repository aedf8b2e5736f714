"""Which drafting methods a portfolio asks: those whose drafts are worth the time that they take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

_TIMES_KEPT = 15
_STEPS_OF_A_PROBE = 6  # that a step with all parts counts for, where some of them had not been asked


class RecentTime:
    """The median of the last few durations: one that the machine held up moves it by a place, not by its length."""

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=_TIMES_KEPT)
        self.seconds = 0.0  # until something was measured

    def record(self, seconds: float) -> None:
        """One more duration."""
        self._durations.append(seconds)
        self.seconds = median(self._durations)


class PartChoice:
    """Measures, for every set of parts, how many draft tokens it would have got right, and what its parts cost.

    A set is a bit mask. What a part adds depends on who is asked beside it: heads that read the same hidden states
    mostly agree, so single parts' rates do not add up, and sets are measured as such. A step with all parts judges all
    sets at once. Asked is the set with the most tokens per time.

    Averages are exponential; the first steps weigh the same each.
    """

    def __init__(self, num_slots: int, num_parts: int, rate: float = 0.05, shared_rate: float = 0.02) -> None:
        """rate, shared_rate: weight of one more step in a sequence's averages and in those over all sequences."""
        self._sets = np.arange(1 << num_parts)
        singles = 1 << np.arange(num_parts)
        self._members = (self._sets[:, None] & singles > 0).astype(np.float64)  # [sets, parts]
        self._sizes = self._members.sum(axis=1)
        self._rate, self._shared_rate = rate, shared_rate
        self._of_slots = np.zeros((num_slots, len(self._sets)))  # right draft tokens per step
        self._shared = np.zeros(len(self._sets))
        self._num_shared = 0  # steps behind the shared averages
        self._num_steps = [
            0
        ] * num_slots  # and behind a slot's, those included that it started from; 0: not started
        self._last_asked = [self.everyone] * num_slots
        self._parts = tuple(RecentTime() for _ in range(num_parts))
        self._rest = RecentTime()

    @property
    def everyone(self) -> int:
        """The set of all parts."""
        return len(self._sets) - 1

    def admit(self, slot: int) -> None:
        """A new sequence: it starts from what holds for all once it gets drafts."""
        self._num_steps[slot] = 0
        self._last_asked[slot] = self.everyone

    def best(self, slot: int, allowed: int, *, alone: bool = False) -> int:
        """The parts to ask for a slot, of those in `allowed`, as a bit mask; more of them where that costs nothing.

        alone: just one of them.
        """
        self._start(slot)
        eligible = self._sets[1:][::-1]
        eligible = eligible[eligible & ~allowed == 0]
        if alone:
            eligible = eligible[self._sizes[eligible] == 1]
        if not len(eligible):
            return 0
        times = self._rest.seconds + self._members[eligible] @ [part.seconds for part in self._parts]
        # Before anything was timed, tokens alone count.
        speeds = (1.0 + self._of_slots[slot, eligible]) / np.maximum(times, 1e-9)
        return int(eligible[np.argmax(speeds)])

    def record(self, slot: int, asked: int, proposers: Sequence[int]) -> None:
        """What a step showed: of each right token in turn, the set of parts that proposed it.

        A set that was asked in part moves as that part of it does: what the others add is taken to last. So sets stay
        comparable, though they are measured in different steps.
        """
        self._start(slot)
        lengths, reached = np.zeros(len(self._sets)), np.ones(len(self._sets), dtype=np.bool_)
        for mask in proposers:
            reached &= self._sets & mask > 0
            lengths += reached
        seen = self._sets & asked
        is_probe = asked == self.everyone != self._last_asked[slot]
        self._last_asked[slot] = asked
        self._num_shared += 1
        self._num_steps[slot] += 1
        for averages, rate, num_steps in (
            (self._of_slots[slot], self._rate, self._num_steps[slot]),
            (self._shared, self._shared_rate, self._num_shared),
        ):
            weight = 1.0 - (1.0 - rate) ** (_STEPS_OF_A_PROBE if is_probe else 1)
            averages += max(weight, 1.0 / num_steps) * (lengths[seen] - averages[seen])

    def record_time(self, part: int, seconds: float) -> None:
        """How long a part drafted in a step."""
        self._parts[part].record(seconds)

    def record_rest(self, seconds: float) -> None:
        """How long a step's other work took."""
        self._rest.record(seconds)

    def _start(self, slot: int) -> None:
        if not self._num_steps[slot]:
            self._of_slots[slot] = self._shared
            self._num_steps[slot] = self._num_shared
