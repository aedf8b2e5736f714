"""Which characters of a stream were drafted, and by whom."""

from __future__ import annotations

from draftline.cli.drafts import DraftPainter, drafters_of_tokens
from draftline.results import Delta, SpeculationStep


def delta(text: str, token_ids: bytes, *steps: tuple[str, int, int]) -> Delta:
    made = tuple(SpeculationStep(method, drafted, accepted) for method, drafted, accepted in steps)
    return Delta("r", 0, text, tuple(token_ids), (), made)


def painter() -> DraftPainter:
    return DraftPainter(lambda ids: bytes(ids).decode("utf-8", "replace"))


def test_accepted_tokens_come_before_the_targets_own():
    assert drafters_of_tokens(delta("abcd", b"abcd", ("ngram", 4, 2), ("off", 0, 0))) == [
        "ngram",
        "ngram",
        None,
        None,
    ]


def test_a_last_step_that_was_cut_short():
    assert drafters_of_tokens(delta("ab", b"ab", ("ngram", 4, 3))) == ["ngram", "ngram"]


def test_nothing_known_means_nothing_coloured():
    assert drafters_of_tokens(delta("ab", b"ab")) == [None, None]


def test_pieces_change_where_the_drafter_changes():
    paint = painter()
    assert paint.pieces(delta("a", b"a", ("off", 0, 0))) == [("a", None)]
    assert paint.pieces(delta("bcd", b"bcd", ("ngram", 4, 2))) == [("bc", "ngram"), ("d", None)]
    assert paint.pieces(delta("ef", b"ef", ("draft-model", 1, 1))) == [("e", "draft-model"), ("f", None)]


def test_characters_made_of_several_tokens_stay_whole():
    euro = "€".encode()
    paint = painter()
    # Two of the three bytes are drafted; the character is told with the last one, which the target chose.
    assert paint.pieces(delta("a", b"a" + euro[:2], ("ngram", 3, 3))) == [("a", "ngram")]
    assert paint.pieces(delta("€b", euro[2:] + b"b", ("off", 0, 0), ("off", 0, 0))) == [("€b", None)]


def test_text_held_back_keeps_its_colour():
    paint = painter()
    assert paint.pieces(delta("", b"ST", ("ngram", 2, 2))) == []
    assert paint.pieces(delta("STa", b"a", ("off", 0, 0))) == [("ST", "ngram"), ("a", None)]


def test_text_cut_at_a_stop_string():
    paint = painter()
    assert paint.pieces(delta("ab", b"abcd", ("ngram", 4, 3))) == [("ab", "ngram")]
    assert "".join(piece for piece, _ in paint.pieces(delta("", b""))) == ""
