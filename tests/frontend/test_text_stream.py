"""Stop strings in streamed text: found wherever they are cut, never leaked, delivered when only half matched."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from scheduler_svc.frontend.text_stream import TextStream
from scheduler_svc.frontend.tokenizer import ServedTokenizer
from tests.frontend.conftest import byte_ids


class Characters:
    """A detokenizer whose ids are code points."""

    def push(self, token_id: int, *, keep_special: bool = False) -> str:
        return chr(token_id)

    def peek(self) -> str:
        return ""

    def flush(self) -> str:
        return ""


def run(stream: TextStream, ids: list[int], min_tokens: int = 0) -> tuple[str, str | None, int]:
    """(text, matched stop, tokens taken)."""
    text = ""
    for count, token_id in enumerate(ids, start=1):
        piece, stop = stream.push(token_id, may_stop=count > min_tokens)
        text += piece
        if stop is not None:
            return text, stop, count
    return text + stream.finish(), None, len(ids)


def stream_of(*stops: str, include_stop: bool = False) -> TextStream:
    return TextStream(Characters(), stops, include_stop)


def ids_of(text: str) -> list[int]:
    return [ord(character) for character in text]


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_over_many_tokens(include_stop: bool) -> None:
    result = run(stream_of("END.", include_stop=include_stop), ids_of("the ENEND. more"))
    assert result == ("the ENEND." if include_stop else "the EN", "END.", 10)


def test_nothing_of_a_stop_is_given_out_before_it_is_sure() -> None:
    stream = stream_of("<stop>")
    assert [stream.push(ord(character))[0] for character in "a<sto"] == ["a", "", "", "", ""]
    assert stream.push(ord("x")) == ("<stox", None)


def test_a_half_matched_stop_is_delivered_at_the_end() -> None:
    assert run(stream_of("END."), ids_of("the END")) == ("the END", None, 7)


def test_the_stop_that_completes_first_wins() -> None:
    assert run(stream_of("bcdef", "cd"), ids_of("abcdef")) == ("ab", "cd", 4)


def test_of_stops_that_complete_together_the_longest_wins() -> None:
    assert run(stream_of("cd", "bcd"), ids_of("abcdef")) == ("a", "bcd", 4)


def test_a_stop_before_min_tokens_is_text() -> None:
    assert run(stream_of("ab"), ids_of("ababab"), min_tokens=3) == ("ab", "ab", 4)
    assert run(stream_of("aa"), ids_of("aaaa"), min_tokens=2) == ("a", "aa", 3)


def test_a_stop_of_cut_characters(served_tokenizer: ServedTokenizer, tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "좋은 🎉끝 end")
    stream = TextStream(served_tokenizer.detokenizer(special_tokens=False), ("🎉끝",), False)
    assert run(stream, ids) == ("좋은 ", "🎉끝", len("좋은 🎉끝".encode()))


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    include_stop=st.booleans(),
)
def test_equals_a_search_in_the_whole_text(text: str, stops: list[str], include_stop: bool) -> None:
    streamed = run(stream_of(*stops, include_stop=include_stop), ids_of(text))
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            longest = max(matched, key=len)
            expected = text[:end] if include_stop else text[: end - len(longest)]
            assert streamed == (expected, longest, end)
            return
    assert streamed == (text, None, len(text))
