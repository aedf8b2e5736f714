"""How often each drafting method is right, by depth and rank or by how sure it was; per sequence and over all."""

from __future__ import annotations

from gpu_worker.drafting.trie import Grade

MAX_DEPTH = 16  # deeper nodes count as this deep
MAX_RANKS = 8  # worse ranked siblings count as the last of these
NUM_BUCKETS = 12  # of confidence, at all depths together


class SuccessRates:
    """Exponential averages of "this node was the token that came, its parent having been right".

    A node that its part states a confidence for is judged by how often such confidence was right, any other by depth
    and rank. A sequence starts from the average over all sequences (the prior) and then follows its own. Plain lists:
    single numbers are read and written a few dozen times a step, which arrays are slow at.
    """

    def __init__(self, num_slots: int, num_parts: int, rate: float = 0.15, shared_rate: float = 0.02) -> None:
        """rate, shared_rate: weight of one more observation in a sequence's average and in the prior."""
        self._rate = rate
        self._shared_rate = shared_rate
        # A guess that lasts for a few dozen observations: every second best candidate is right, others less often; and
        # a part is as often right as it says.
        guess = [0.5 * 0.3**rank for _ in range(MAX_DEPTH) for rank in range(MAX_RANKS)]
        guess += [(bucket + 0.5) / NUM_BUCKETS for bucket in range(NUM_BUCKETS)]
        self._shared = [list(guess) for _ in range(num_parts)]  # [parts]: by depth and rank, then by bucket
        self._of_slots = [[list(guess) for _ in range(num_parts)] for _ in range(num_slots)]

    def admit(self, slot: int) -> None:
        """A new sequence: nothing is known of it yet but what holds for all."""
        self._of_slots[slot] = [list(rates) for rates in self._shared]

    def rate(self, slot: int, part: int, depth: int, grade: Grade) -> float:
        """The estimate for a node at `depth` (1 behind the root) that its part gives this grade."""
        place = _place(depth, grade.rank) if grade.confidence is None else _bucket(grade.confidence)
        return self._of_slots[slot][part][place]

    def reach(self, slot: int, part: int, least_probability: float) -> int:
        """Levels down to which the part's best path is worth at least least_probability; 0: not even its first node."""
        rates, worth = self._of_slots[slot][part], 1.0
        for depth in range(MAX_DEPTH):
            worth *= rates[depth * MAX_RANKS]
            if worth < least_probability:
                return depth
        return MAX_DEPTH

    def record(self, slot: int, part: int, depth: int, grade: Grade, right: bool) -> None:
        """One observation."""
        places = [_place(depth, grade.rank)]
        if grade.confidence is not None:
            places.append(_bucket(grade.confidence))
        own, shared = self._of_slots[slot][part], self._shared[part]
        for place in places:
            own[place] += self._rate * (right - own[place])
            shared[place] += self._shared_rate * (right - shared[place])


def _place(depth: int, rank: int) -> int:
    depth = depth if depth < MAX_DEPTH else MAX_DEPTH
    rank = rank if rank < MAX_RANKS else MAX_RANKS - 1
    return (depth - 1) * MAX_RANKS + rank


def _bucket(confidence: float) -> int:
    bucket = int(confidence * NUM_BUCKETS)
    return MAX_DEPTH * MAX_RANKS + (bucket if bucket < NUM_BUCKETS else NUM_BUCKETS - 1)
