"""The store of recent outputs: longest and newest match, never across salts or texts, never beyond its memory."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_worker.drafting.suffix_store import StoredMatch, SuffixStore


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def store(*texts: tuple[int, ...], salt_id: int = 0, **options: int) -> SuffixStore:
    made = SuffixStore(**options)
    for text in texts:
        made.add(ids(*text), salt_id)
    return made


def test_what_followed_is_proposed() -> None:
    found = store((1, 2, 3, 4, 5, 6)).find(ids(9, 2, 3, 4), 5, 0)
    assert found == StoredMatch(3, [5, 6])
    assert store((1, 2, 3, 4, 5, 6)).find(ids(9, 2, 3, 4), 1, 0) == StoredMatch(3, [5])


def test_longest_match_wins_and_of_equal_ones_the_newest() -> None:
    texts = store((7, 1, 2, 3, 40), (8, 1, 2, 3, 50), (9, 1, 2, 3, 60))
    assert texts.find(ids(8, 1, 2, 3), 4, 0) == StoredMatch(4, [50])
    assert texts.find(ids(5, 1, 2, 3), 4, 0) == StoredMatch(3, [60])


def test_matches_stop_counting_at_max_match() -> None:
    texts = store((0, 1, 2, 3, 4, 40), (9, 1, 2, 3, 4, 50), max_match=4)
    assert texts.find(ids(0, 1, 2, 3, 4), 1, 0) == StoredMatch(4, [50])


def test_short_matches_and_bare_ends_are_none() -> None:
    texts = store((1, 2, 3, 4))
    assert texts.find(ids(3, 4), 4, 0) is None
    assert texts.find(ids(9, 3, 4), 4, 0) is None
    assert texts.find(ids(2, 3, 4), 4, 0) is None  # nothing follows
    assert texts.find(ids(1, 2, 3), 0, 0) is None
    assert store().find(ids(1, 2, 3), 4, 0) is None


def test_nothing_crosses_from_text_to_text() -> None:
    texts = store((5, 1, 2, 3, 4), (6, 7, 8, 9))
    assert texts.find(ids(1, 2, 3), 9, 0) == StoredMatch(3, [4])
    assert texts.find(ids(3, 4, 6), 9, 0) is None
    assert texts.find(ids(4, 6, 7), 9, 0) is None


def test_nothing_crosses_salts() -> None:
    made = SuffixStore()
    made.add(ids(1, 2, 3, 4), 11)
    made.add(ids(1, 2, 3, 5), 12)
    assert made.find(ids(1, 2, 3), 1, 11) == StoredMatch(3, [4])
    assert made.find(ids(1, 2, 3), 1, 12) == StoredMatch(3, [5])
    assert made.find(ids(1, 2, 3), 1, 0) is None


def test_equal_keys_of_other_salts_do_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the hash to fail completely, texts and salts would still be compared."""
    monkeypatch.setattr(SuffixStore, "_ngram_keys", lambda self, token_ids, salt_id: [0] * len(token_ids))
    made = SuffixStore()
    made.add(ids(1, 2, 3, 4), 11)
    made.add(ids(6, 7, 8, 9), 12)
    assert made.find(ids(1, 2, 3), 1, 11) == StoredMatch(3, [4])
    assert made.find(ids(1, 2, 3), 1, 12) is None
    assert made.find(ids(6, 7, 8), 1, 12) == StoredMatch(3, [9])


@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_a_plain_search_while_texts_are_overwritten(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = SuffixStore(max_tokens=60, min_match=2, max_match=5, max_places=1000)
    held: list[tuple[int, int]] = []  # (token, salt) of every place, as the ring holds them
    for _ in range(80):
        salt = int(rng.integers(2))
        text = rng.integers(0, 4, size=int(rng.integers(0, 90)))
        made.add(text, salt)
        if len(text) > 2:
            held = [*held, *((int(token), salt) for token in text[-59:]), (-1, salt)][-60:]
        assert made.num_tokens == len(held)
        assert len(made._newest) <= 60
        tail = rng.integers(0, 4, size=6)
        found = made.find(tail, 3, salt)
        best, expected = 1, None
        for end in range(len(held) - 1):
            length = 0
            while length < 5 and end - length >= 0 and held[end - length] == (int(tail[-1 - length]), salt):
                length += 1
            if length >= max(best, 2) and held[end + 1][0] != -1:
                following = [token for token, _ in held[end + 1 : end + 4]]
                following = following[: following.index(-1)] if -1 in following else following
                best, expected = length, StoredMatch(length, following)
        assert found == expected


def test_old_texts_give_way() -> None:
    made = SuffixStore(max_tokens=10)
    made.add(ids(1, 2, 3, 4), 0)
    made.add(ids(11, 12, 13, 14, 15, 16, 17), 0)
    assert made.find(ids(1, 2, 3), 1, 0) is None
    assert made.find(ids(11, 12, 13), 1, 0) == StoredMatch(3, [14])
    made.add(np.arange(100, 200), 0)  # longer than the store: its end is kept
    assert made.num_tokens == 10
    assert made.find(ids(192, 193, 194), 2, 0) == StoredMatch(3, [195, 196])
    assert len(made._newest) <= 10


def test_options_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="min_match is 0"):
        SuffixStore(min_match=0)
    with pytest.raises(ValueError, match=r"min_match is 9, must be within 1\.\.max_match \(8\)"):
        SuffixStore(min_match=9, max_match=8)
    with pytest.raises(ValueError, match="max_tokens is 3"):
        SuffixStore(max_tokens=3)
