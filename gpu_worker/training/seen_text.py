"""Beside dataset.py: held-out conversations that say again what training ones say, and so would flatter a head."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

RUN_TOKENS = 16  # so many learnt tokens in a row that stand elsewhere too are the same text, not chance
MOST_SEEN = 0.1  # share of a conversation's runs

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd: a run's last tokens do not lose their bits


class SeenText:
    """Every run of RUN_TOKENS tokens that training learns, by its hash."""

    def __init__(self, training: Iterable[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]) -> None:
        """training: token_ids [T] and answer [T] of each conversation, see features.py."""
        self._seen = np.unique(np.concatenate([np.zeros(0, np.uint64), *(_runs(*of) for of in training)]))

    def share(self, token_ids: npt.NDArray[np.int32], answer: npt.NDArray[np.uint8]) -> float:
        """How much of a conversation's learnt text training learns too; 0 where it has no whole run."""
        runs = _runs(token_ids, answer)
        if not len(runs) or not len(self._seen):
            return 0.0
        places = np.searchsorted(self._seen, runs).clip(max=len(self._seen) - 1)
        return float((self._seen[places] == runs).mean())

    def repeats(self, token_ids: npt.NDArray[np.int32], answer: npt.NDArray[np.uint8]) -> bool:
        """Whether so much of it is learnt too that it would flatter a head: more than MOST_SEEN."""
        return self.share(token_ids, answer) > MOST_SEEN


def _runs(token_ids: npt.NDArray[np.int32], answer: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Hashes of all runs that lie within answers: polynomials of the tokens modulo 2**64."""
    count = len(token_ids) - RUN_TOKENS + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    tokens = token_ids.astype(np.uint64) + np.uint64(1)
    hashes, learnt = np.zeros(count, dtype=np.uint64), np.ones(count, dtype=np.bool_)
    for i in range(RUN_TOKENS):
        hashes = hashes * _BASE + tokens[i : i + count]
        learnt &= answer[i : i + count] == 1
    return hashes[learnt]
