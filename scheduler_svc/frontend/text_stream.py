"""One sample's text on its way out: detokenised, searched for stops, held back while one may complete."""

from __future__ import annotations

from scheduler_svc.frontend.detokenizer import Detokenizer


class TextStream:
    """Turns ids into text that may be sent. Of a stop string that completes nothing is ever given out.

    Stops are matched in the text, whatever its tokens; the one that completes first wins, of several that
    complete at one character the longest.
    """

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], include_stop: bool) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""  # the end of the text so far, as far as it is the start of a stop

    def push(
        self, token_id: int, *, may_stop: bool = True, keep_special: bool = False
    ) -> tuple[str, str | None]:
        """Text that this id makes final, and the stop string it completes (then the sample is over).

        `may_stop` False (before min_tokens): a stop that completes here is ordinary text.
        """
        piece = self._detokenizer.push(token_id, keep_special=keep_special)
        if not self._stops:
            return piece, None
        text = self._held + piece
        if may_stop:
            match = self._first_stop(text + self._detokenizer.peek(), len(self._held))
            if match is not None:
                start, stop = match
                self._held = ""
                whole = text + self._detokenizer.peek()
                return whole[: start + len(stop) if self._include_stop else start], stop
        held = self._num_held(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def finish(self) -> str:
        """The rest, when the sample ends otherwise: a half-matched stop, and U+FFFD for a cut character."""
        rest = self._held + self._detokenizer.flush()
        self._held = ""
        return rest

    def _first_stop(self, text: str, num_old: int) -> tuple[int, str] | None:
        """(start, stop) of the match that ends first, of those ending behind `num_old` characters."""
        best: tuple[int, int, str] | None = None  # (end, start, stop)
        for stop in self._stops:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that is the start of a stop."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
