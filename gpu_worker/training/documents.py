"""Beside openings.py: users' turns about texts of one's own, which a synthesised conversation may begin with.

Much of what people ask is about a text that they give: translate it, answer from it, change this code. The answers copy
names, numbers and phrases, which prompts that a target writes by itself hardly ever give it to copy.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from gpu_worker.training.document_answers import AnsweredTurn, answered_turn
from gpu_worker.training.passages import Passage, names_in

_MAX_PASSAGES_AT_ONCE = 3
_MOST_DRAWS = 8  # until a passage suits the task that is drawn for it

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

    def draw_answered(self, rng: random.Random) -> AnsweredTurn | None:
        """A task whose answer stands in the passage; None where none of a few passages drawn has one."""
        turns = (answered_turn(rng.choice(self._passages), rng) for _ in range(_MOST_DRAWS))
        return next((turn for turn in turns if turn is not None), None)


def _phrase(passage: Passage, rng: random.Random) -> str:
    """A name in the passage, or else any longer word of it."""
    words = names_in(passage.text) or re.findall(r"\w{6,}", passage.text) or [passage.text[:20]]
    return str(rng.choice(words))
