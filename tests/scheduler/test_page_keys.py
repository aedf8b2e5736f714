"""Names of pages: the same however the tokens came, and apart for other salts and other beginnings."""

from __future__ import annotations

from array import array

from scheduler_svc.scheduler.page_keys import PageKeys, prefix_id, root_id


def keys_of(tokens: list[int], salt: str = "") -> PageKeys:
    keys = PageKeys(salt, 4)
    keys.extend(tokens)
    return keys


def test_only_full_pages_have_keys_and_growth_is_the_same_as_all_at_once() -> None:
    tokens = [7, 1_000_000, *range(9)]
    keys = keys_of(tokens[:6])
    assert keys.keys == [array("i", tokens[:4]).tobytes()]
    for end in (7, 8, 8, 11):
        keys.extend(tokens[:end])
    assert keys.keys == keys_of(tokens).keys == [array("i", tokens[i : i + 4]).tobytes() for i in (0, 4)]
    assert keys.prefix_ids == keys_of(tokens).prefix_ids


def test_numbers_tell_beginnings_and_salts_apart() -> None:
    same_second_page = keys_of([1, 2, 3, 4, 9, 9, 9, 9]), keys_of([4, 3, 2, 1, 9, 9, 9, 9])
    assert same_second_page[0].keys[1] == same_second_page[1].keys[1]
    assert same_second_page[0].prefix_ids[1] != same_second_page[1].prefix_ids[1]
    salted = keys_of([1, 2, 3, 4], "salt")
    assert salted.prefix_ids[0] == prefix_id(root_id("salt"), salted.keys[0])
    assert salted.prefix_ids[0] != same_second_page[0].prefix_ids[0]


def test_a_copy_grows_apart() -> None:
    keys = keys_of([1, 2, 3, 4])
    copy = keys.copy()
    copy.extend([1, 2, 3, 4, 5, 6, 7, 8])
    assert (len(keys.keys), len(keys.prefix_ids), len(copy.keys), len(copy.prefix_ids)) == (1, 1, 2, 2)
