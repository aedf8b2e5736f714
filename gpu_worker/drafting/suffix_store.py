"""Recent outputs of other requests, searched by the n-gram drafter when a sequence's own text offers no match.

Off unless a store is given. What one tenant's requests wrote must never show in the drafts, and so in the speed, of
another's: every text belongs to a salt, and a lookup sees only texts of its own salt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpu_worker.request_state import Int64Array

_BREAK = -1  # behind every text; no token id, so no match and no continuation runs across it
_NONE = -1


@dataclass(frozen=True)
class StoredMatch:
    """Where a sequence's tail occurs in the store."""

    length: int  # tokens that agree
    continuation: list[int]  # what followed them, in order


class SuffixStore:
    """The last `max_tokens` tokens of finished outputs in one ring, with an index of their n-grams of `min_match`.

    Memory is bounded: four arrays of max_tokens numbers and at most one index entry per place, about 200 bytes a token
    in all. Each place also knows the previous place of the same n-gram, so a lookup walks from the newest to older
    ones, at most `max_places` of them.
    """

    def __init__(
        self, max_tokens: int = 65_536, min_match: int = 3, max_match: int = 16, max_places: int = 16
    ) -> None:
        """Raises ValueError unless 1 <= min_match <= max_match and max_tokens exceeds min_match."""
        if not 1 <= min_match <= max_match:
            raise ValueError(f"min_match is {min_match}, must be within 1..max_match ({max_match})")
        if max_tokens <= min_match:
            raise ValueError(f"max_tokens is {max_tokens}, must exceed min_match ({min_match})")
        self._max_tokens = max_tokens
        self._min_match = min_match
        self._max_match = max_match
        self._max_places = max_places
        # Places count up for ever; place p lies at p % max_tokens until p + max_tokens overwrites it.
        self._end = 0
        self._tokens: Int64Array = np.full(max_tokens, _BREAK, dtype=np.int64)
        self._salts: Int64Array = np.zeros(max_tokens, dtype=np.int64)
        self._keys: Int64Array = np.zeros(max_tokens, dtype=np.int64)
        self._previous: Int64Array = np.full(max_tokens, _NONE, dtype=np.int64)  # place of the same n-gram
        self._newest: dict[int, int] = {}  # key of an n-gram -> the last place where it ends

    @property
    def num_tokens(self) -> int:
        """Tokens held now, breaks between texts included."""
        return min(self._end, self._max_tokens)

    def add(self, token_ids: Int64Array, salt_id: int) -> None:
        """Takes a finished output [n]; the oldest texts give way. Of one longer than the store the end is kept."""
        token_ids = token_ids[-(self._max_tokens - 1) :]
        n = len(token_ids)
        if n <= self._min_match:  # nothing could follow a match in it
            return
        keys = self._ngram_keys(token_ids, salt_id)
        for i, (token, key) in enumerate(zip([*token_ids.tolist(), _BREAK], [*keys, None], strict=True)):
            self._append(token, salt_id, key if i >= self._min_match - 1 else None)

    def find(self, tail: Int64Array, num_tokens: int, salt_id: int) -> StoredMatch | None:
        """The longest match of the end of `tail` [n] in the texts of `salt_id`, and up to num_tokens that followed it.

        Of equally long matches the newest; None if fewer than min_match tokens agree or nothing follows.
        """
        if len(tail) < self._min_match or num_tokens < 1:
            return None
        tail = tail[-self._max_match :]
        key = self._ngram_keys(tail[-self._min_match :], salt_id)[-1]
        place, best, best_place = self._newest.get(key, _NONE), 0, _NONE
        for _ in range(self._max_places):
            if place < self._oldest():
                break
            length = self._match_length(place, tail, salt_id)
            if length > best and self._token(place + 1) != _BREAK:
                best, best_place = length, place
            place = int(self._previous[place % self._max_tokens])
        if best < self._min_match:
            return None
        continuation: list[int] = []
        for following in range(best_place + 1, min(best_place + 1 + num_tokens, self._end)):
            if (token := self._token(following)) == _BREAK:
                break
            continuation.append(token)
        return StoredMatch(best, continuation)

    def _append(self, token: int, salt_id: int, key: int | None) -> None:
        """One more place; `key` None: no n-gram ends here."""
        place, at = self._end, self._end % self._max_tokens
        overwritten = place - self._max_tokens
        if overwritten >= 0 and self._newest.get(int(self._keys[at])) == overwritten:
            del self._newest[int(self._keys[at])]
        self._tokens[at], self._salts[at] = token, salt_id
        self._keys[at], self._previous[at] = 0, _NONE
        if key is not None:
            self._keys[at], self._previous[at] = key, self._newest.get(key, _NONE)
            self._newest[key] = place
        self._end += 1

    def _match_length(self, place: int, tail: Int64Array, salt_id: int) -> int:
        """How many tokens that end at `place` agree with the end of `tail`, all in one text of this salt."""
        if self._salts[place % self._max_tokens] != salt_id:  # equal keys do not prove equal salts
            return 0
        oldest, length = self._oldest(), 0
        for token in tail[::-1].tolist():
            if place - length < oldest or self._token(place - length) != token:
                break
            length += 1
        return length

    def _oldest(self) -> int:
        return max(0, self._end - self._max_tokens)

    def _token(self, place: int) -> int:
        """The token at a place that is not overwritten; a break at the end of what is written."""
        return int(self._tokens[place % self._max_tokens]) if place < self._end else _BREAK

    def _ngram_keys(self, token_ids: Int64Array, salt_id: int) -> list[int]:
        """[n] a number for the min_match tokens that end at each place and their salt; no use before min_match - 1."""
        keys = np.full(len(token_ids), salt_id & 0x7FFFFFFFFFFFFFFF, dtype=np.uint64)
        for back in range(self._min_match):
            shifted = np.roll(token_ids, back).astype(np.uint64)
            keys = (keys ^ shifted) * np.uint64(
                0x9E3779B97F4A7C15
            )  # wraps: only a hash, matches are compared
            keys ^= keys >> np.uint64(29)
        return keys.astype(np.int64).tolist()
