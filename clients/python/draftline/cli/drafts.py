"""Finds out which part of a streamed text was drafted, and by whom (`generate --show-drafts`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from draftline.results import Delta

REPLACEMENT = "\ufffd"  # what an incomplete character decodes to


def drafters_of_tokens(delta: Delta) -> list[str | None]:
    """For each token of the delta the method whose draft was accepted, None for the target's own tokens.

    A step's tokens are its accepted drafts, then one token of the target; the last step may be cut short.
    """
    drafters: list[str | None] = []
    for step in delta.speculation_steps:
        drafters += [step.method] * step.accepted_tokens + [None]
    missing = len(delta.token_ids) - len(drafters)
    return (drafters + [None] * missing)[: len(delta.token_ids)]


class DraftPainter:
    """Splits the text of one sample's deltas where the drafter changes.

    Text and token ids of a delta need not match (an incomplete character or half a stop string is held back),
    so a change at token b is placed behind the text of the first b tokens, which `detokenize` tells; it is
    called once for each change.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str]) -> None:
        self._detokenize = detokenize
        self._token_ids: list[int] = []
        self._changes: list[int] = [0]  # character where a span begins
        self._drafters: list[str | None] = [None]  # who drafted that span
        self._written = 0

    def pieces(self, delta: Delta) -> list[tuple[str, str | None]]:
        """The delta's text as (piece, drafter or None)."""
        for token, drafter in zip(delta.token_ids, drafters_of_tokens(delta), strict=True):
            if drafter != self._drafters[-1]:
                self._changes.append(self._length())
                self._drafters.append(drafter)
            self._token_ids.append(token)
        pieces = []
        text = delta.text
        while text:
            span = bisect_right(self._changes, self._written) - 1
            end = self._changes[span + 1] if span + 1 < len(self._changes) else self._written + len(text)
            piece, text = text[: end - self._written], text[end - self._written :]
            pieces.append((piece, self._drafters[span]))
            self._written += len(piece)
        return pieces

    def _length(self) -> int:
        """Characters of the tokens so far, at least where the last span begins."""
        text = self._detokenize(self._token_ids) if self._token_ids else ""
        return max(len(text.rstrip(REPLACEMENT)), self._changes[-1])
