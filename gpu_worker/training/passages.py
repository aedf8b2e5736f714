"""Beside documents.py: the text, Markdown, HTML and source files of a directory, cut into passages."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from gpu_worker.training.errors import TrainingError

_PROSE = frozenset({".txt", ".md", ".rst", ".html", ".htm"})
_CODE = {
    ".py": "python", ".js": "javascript", ".ts": "typescript", ".go": "go", ".java": "java", ".c": "c", ".h": "c",
    ".cpp": "cpp", ".rs": "rust", ".sh": "bash", ".sql": "sql",
}  # fmt: skip
_MAX_FILE_BYTES = 4 << 20
_MIN_PASSAGE_CHARS = 200
MAX_PASSAGE_CHARS = 1100  # unless told otherwise: about 280 tokens of English


@dataclass(frozen=True)
class Passage:
    """A piece of a document; `kind` names the language of code, "" is prose."""

    text: str
    kind: str = ""


def read_passages(directory: Path, max_chars: int = MAX_PASSAGE_CHARS) -> list[Passage]:
    """All passages of the text, Markdown, HTML and source files below `directory`, in order of path.

    max_chars: of a passage, at least 200. Files that cannot be read, are no UTF-8 or larger than 4 MiB are left out.
    Raises TrainingError naming a directory that does not exist or has no passage of at least 200 characters.
    """
    if not directory.is_dir():
        raise TrainingError(f"documents {directory}: no such directory")
    passages: dict[Passage, None] = {}  # in order, without repeats
    for path in sorted(directory.rglob("*")):
        suffix = path.suffix.lower()
        if suffix in _PROSE or suffix in _CODE:
            passages |= dict.fromkeys(_of_file(path, suffix, max_chars))
    if not passages:
        known = " ".join(sorted([*_PROSE, *_CODE]))
        raise TrainingError(
            f"documents {directory}: no passage of {_MIN_PASSAGE_CHARS} characters in {known}"
        )
    return list(passages)


def names_in(text: str) -> list[str]:
    """Runs of capitalised words that do not begin a sentence, in order."""
    return re.findall(r"(?<=[a-z,] )[A-Z]\w+(?: [A-Z]\w+)*", text)


def _of_file(path: Path, suffix: str, max_chars: int) -> Iterator[Passage]:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
            return
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    kind = _CODE.get(suffix, "")
    if kind:
        # Blank lines before something that begins in the first column: mostly between definitions.
        pieces = re.split(r"\n\s*\n(?=\S)", text)
    elif suffix in (".html", ".htm"):
        pieces = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", _text_of_html(text))]
    else:
        pieces = re.split(r"\n\s*\n", text)
    yield from (Passage(passage, kind) for passage in _passages(pieces, max_chars))


def _passages(pieces: Sequence[str], most: int) -> Iterator[str]:
    """Neighbouring pieces together as long as they fit; longer ones are cut at lines, and their end goes on."""
    least = _MIN_PASSAGE_CHARS
    held = ""
    for piece in pieces:
        rest = "\n".join(line.rstrip() for line in piece.splitlines()).strip("\n")
        if not rest:
            continue
        together = f"{held}\n\n{rest}" if held else rest
        if len(together) > most:
            if len(held) >= least:
                yield held
            *parts, together = _cut(rest, most)
            yield from (part for part in parts if len(part) >= least)
        held = together
    if len(held) >= least:
        yield held


def _cut(text: str, most: int) -> list[str]:
    """Parts of at most `most` characters: whole lines, unless one alone is longer; that is cut between words."""
    parts = [""]
    for line in text.split("\n"):
        for piece in [line] if len(line) <= most else textwrap.wrap(line, most):
            if len(parts[-1]) + 1 + len(piece) > most:
                parts.append("")
            parts[-1] = f"{parts[-1]}\n{piece}" if parts[-1] else piece
    return parts


class _HTMLText(HTMLParser):
    """Collects what a reader would see; block elements end a paragraph."""

    # Elements that cannot be left open; the layout of `pre` would be lost with the line breaks.
    _HIDDEN = frozenset({"script", "style", "title", "nav", "pre"})
    _BLOCKS = frozenset({
        "p", "div", "section", "article", "blockquote", "br", "h1", "h2", "h3", "h4", "h5", "h6", "li", "ul", "ol",
        "dd", "dt", "table", "caption", "tr", "td", "th",
    })  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._num_hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._num_hidden += tag in self._HIDDEN
        if tag in self._BLOCKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        self._num_hidden -= tag in self._HIDDEN and self._num_hidden > 0
        if tag in self._BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._num_hidden:
            self.parts.append(data)


def _text_of_html(text: str) -> str:
    parser = _HTMLText()
    parser.feed(text)
    parser.close()
    return "".join(parser.parts)
