"""Beside openings.py: users' turns about texts of one's own, which a synthesised conversation may begin with.

Much of what people ask is about a text that they give: translate it, answer from it, change this code. The answers copy
names, numbers and phrases, which prompts that a target writes by itself hardly ever give it to copy.
"""

from __future__ import annotations

import random
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
_PASSAGE_CHARS = (200, 1100)  # about 50 to 280 tokens of English
_MAX_PASSAGES_AT_ONCE = 3

_LANGUAGES = ("German", "French", "Spanish", "Italian", "English", "Portuguese", "Dutch")
_ABOUT_PROSE = (
    "Translate this text into {language}.\n\n{text}",
    "{text}\n\nPut the text above into {language}.",
    "Give the main points of the following text as a list.\n\n{text}",
    "{text}\n\nSum this up in two sentences.",
    "Which names, dates and numbers does this text mention?\n\n{text}",
    "Turn what this text says into JSON.\n\n{text}",
    "{text}\n\nWhat does the passage say about {phrase}? Use its own words.",
    "Rewrite this so that a beginner understands it:\n\n{text}",
    "Correct the style of this paragraph and change as little as you can.\n\n{text}",
    "{text}\n\nWrite three questions about this text and answer them.",
    "Continue this text.\n\n{text}",
    "Find a title for this text and say why it fits.\n\n{text}",
)
_ABOUT_PASSAGES = (
    "{texts}\n\nAnswer from the passages above and name the one that you use: what is said about {phrase}?",
    "These notes belong together:\n\n{texts}\n\nWrite a short report from them.",
    "{texts}\n\nWhich of these passages is about {phrase}? Quote the sentence.",
)
_ABOUT_CODE = (
    "What does this code do?\n\n```{kind}\n{text}\n```",
    "Add comments to this code and give it back whole.\n\n```{kind}\n{text}\n```",
    "```{kind}\n{text}\n```\n\nWrite tests for this.",
    "Finish this code:\n\n```{kind}\n{half}",
    "Rename the variables of this code so that it reads better.\n\n```{kind}\n{text}\n```",
    "```{kind}\n{text}\n```\n\nAre there mistakes in it? Show the corrected code.",
)


@dataclass(frozen=True)
class Passage:
    """A piece of a document; `kind` names the language of code, "" is prose."""

    text: str
    kind: str = ""


def read_passages(directory: Path) -> list[Passage]:
    """All passages of the text, Markdown, HTML and source files below `directory`, in order of path.

    Files that cannot be read, are no UTF-8 or larger than 4 MiB are left out. Raises TrainingError naming a directory
    that does not exist or has no passage of at least 200 characters.
    """
    if not directory.is_dir():
        raise TrainingError(f"documents {directory}: no such directory")
    passages: dict[Passage, None] = {}  # in order, without repeats
    for path in sorted(directory.rglob("*")):
        suffix = path.suffix.lower()
        if suffix in _PROSE or suffix in _CODE:
            passages |= dict.fromkeys(_of_file(path, suffix))
    if not passages:
        known = " ".join(sorted([*_PROSE, *_CODE]))
        raise TrainingError(f"documents {directory}: no passage of {_PASSAGE_CHARS[0]} characters in {known}")
    return list(passages)


class DocumentPrompts:
    """Draws users' turns about passages; the same rng gives the same turn."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        """At least one passage."""
        assert passages, "read_passages gives some"
        self._passages = passages
        self._prose = [passage for passage in passages if not passage.kind]

    def draw(self, rng: random.Random) -> str:
        """A task and the passage, or the few passages, that it is about."""
        passage = rng.choice(self._passages)
        if passage.kind:
            lines = passage.text.splitlines()
            half = "\n".join(lines[: max(1, len(lines) // 2)])
            return rng.choice(_ABOUT_CODE).format(kind=passage.kind, text=passage.text, half=half)
        task = rng.choice((*_ABOUT_PROSE, *_ABOUT_PASSAGES))
        some = [passage]
        if task in _ABOUT_PASSAGES:
            some = rng.sample(self._prose, min(len(self._prose), rng.randint(2, _MAX_PASSAGES_AT_ONCE)))
        texts = "\n\n".join(f"[{number}] {each.text}" for number, each in enumerate(some, start=1))
        phrase = _phrase(rng.choice(some), rng)
        return task.format(text=some[0].text, texts=texts, language=rng.choice(_LANGUAGES), phrase=phrase)


def _of_file(path: Path, suffix: str) -> Iterator[Passage]:
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
    yield from (Passage(passage, kind) for passage in _passages(pieces))


def _passages(pieces: Sequence[str]) -> Iterator[str]:
    """Neighbouring pieces together as long as they fit; longer ones are cut at lines, and their end goes on."""
    least, most = _PASSAGE_CHARS
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


def _phrase(passage: Passage, rng: random.Random) -> str:
    """A name in the passage, or else any longer word of it."""
    words = re.findall(r"(?<=[a-z,] )[A-Z]\w+(?: [A-Z]\w+)*", passage.text)
    words = words or re.findall(r"\w{6,}", passage.text) or [passage.text[:20]]
    return str(rng.choice(words))


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
