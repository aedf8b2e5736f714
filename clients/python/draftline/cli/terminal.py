"""Writes a model's text to stdout: styled and made safe on a terminal, untouched into a file or pipe."""

from __future__ import annotations

import re
import sys

from rich.console import Console

# A model's output must not steer the reader's terminal: everything of C0 and C1 but tab and newline.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_STYLES = ("bold green", "bold cyan", "bold magenta", "bold yellow", "bold blue")


class TextWriter:
    """Streams pieces of text; each drafter gets a colour of its own, in the order of appearance."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._style_of: dict[str, str] = {}
        self._at_line_start = True

    def write(self, text: str, drafter: str | None = None) -> None:
        """Writes a piece, in the drafter's colour if it has one and stdout is a terminal."""
        if not text:
            return
        self._at_line_start = text.endswith("\n")
        if self._console.is_terminal:
            visible = _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)
            self._console.out(visible, style=self.style_of(drafter), highlight=False, end="")
        else:
            sys.stdout.write(text)
        sys.stdout.flush()

    def end_line(self) -> None:
        """Ends the line if text stands on it."""
        if not self._at_line_start:
            self.write("\n")

    def style_of(self, drafter: str | None) -> str | None:
        """The drafter's colour, None for the target's own tokens."""
        if drafter is None:
            return None
        return self._style_of.setdefault(drafter, _STYLES[len(self._style_of) % len(_STYLES)])

    def legend(self) -> str:
        """Which colour stands for whom; "" if nothing was coloured."""
        return ", ".join(f"{drafter}: {style}" for drafter, style in self._style_of.items())
