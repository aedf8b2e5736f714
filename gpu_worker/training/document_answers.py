"""Beside documents.py: turns about a passage whose answer the passage holds, so that the target need not write it.

Such answers cost no generation and copy names, phrases and code, which is what heads learn least from the target's own
prompts. The target still says how likely each token is: `extract` runs it over them like over its own answers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.training.passages import Passage, names_in


@dataclass(frozen=True)
class AnsweredTurn:
    """What a user asks, with the passage in it, and what is to be answered."""

    prompt: str
    answer: str


_CONTINUE = ("Continue this text.\n\n{text}", "How does this text go on?\n\n{text}", "{text}")
_WRITE = (
    'Write a text that begins with "{first}"',
    "How would a text go on that begins like this: {first}",
    "{first} ... What comes next? Write it all down.",
)
_COPY = (
    "Copy this text.\n\n{text}",
    "{text}\n\nGive the text above back, word for word.",
    "Correct the typing errors of this text.\n\n{text}",
)
_SUM_UP = (
    "Sum this up in {count} of its own sentences.\n\n{text}",
    "{text}\n\nWhich sentences of this text matter most?",
    "Shorten this text.\n\n{text}",
)
_QUOTE = (
    "{text}\n\nWhat does the text say about {phrase}? Quote it.",
    "Answer from this text: what is said about {phrase}?\n\n{text}",
)
_NAMES = (
    "Which names does this text mention?\n\n{text}",
    "List the people, places and things that have a name in this text.\n\n{text}",
)
_FINISH_CODE = ("Finish this code:\n\n```{kind}\n{text}", "Complete this.\n\n```{kind}\n{text}\n```")
_RENAME = (
    "Rename `{old}` to `{new}` in this code.\n\n```{kind}\n{text}\n```",
    "```{kind}\n{text}\n```\n\nCall `{old}` `{new}` instead.",
)
_NEW_NAMES = ("result", "current", "total", "entries", "handle", "value", "name", "source", "item", "context")


def answered_turn(passage: Passage, rng: random.Random) -> AnsweredTurn | None:
    """A turn and its answer; the same rng gives the same. None where the passage does not suit the task drawn."""
    tasks = (
        (_finished, _renamed)
        if passage.kind
        else (_continued, _written, _copied, _summed_up, _quoted, _named)
    )
    return rng.choice(tasks)(passage, rng)


def _continued(passage: Passage, rng: random.Random) -> AnsweredTurn | None:
    words = passage.text.split(" ")
    if len(words) < 12:
        return None
    cut = rng.randint(4, len(words) // 2)
    first, rest = " ".join(words[:cut]), " ".join(words[cut:])
    return AnsweredTurn(rng.choice(_CONTINUE).format(text=first), rest)


def _written(passage: Passage, rng: random.Random) -> AnsweredTurn | None:
    words = passage.text.split()
    if len(words) < 24:
        return None
    return AnsweredTurn(rng.choice(_WRITE).format(first=" ".join(words[: rng.randint(3, 8)])), passage.text)


def _copied(passage: Passage, rng: random.Random) -> AnsweredTurn | None:
    return AnsweredTurn(rng.choice(_COPY).format(text=passage.text), passage.text)


def _summed_up(passage: Passage, rng: random.Random) -> AnsweredTurn | None:
    sentences = _sentences(passage.text)
    if len(sentences) < 3:
        return None
    count = rng.randint(1, min(4, len(sentences) - 1))
    kept = sorted(rng.sample(range(len(sentences)), count))
    answer = " ".join(sentences[i] for i in kept)
    return AnsweredTurn(rng.choice(_SUM_UP).format(text=passage.text, count=count), answer)


def _quoted(passage: Passage, rng: random.Random) -> AnsweredTurn | None:
    found = names_in(passage.text)
    if not found:
        return None
    phrase = rng.choice(found)
    sentence = next((s for s in _sentences(passage.text) if phrase in s), "")
    if not sentence:
        return None
    lead = rng.choice(("", f"About {phrase} the text says: ", "The text says: "))
    answer = f'{lead}"{sentence}"' if lead else sentence
    return AnsweredTurn(rng.choice(_QUOTE).format(text=passage.text, phrase=phrase), answer)


def _named(passage: Passage, rng: random.Random) -> AnsweredTurn | None:
    found = list(dict.fromkeys(names_in(passage.text)))
    if len(found) < 3:
        return None
    mark: Callable[[int], str] = rng.choice((lambda i: f"{i}. ", lambda _: "- ", lambda _: "* "))
    answer = "\n".join(f"{mark(i)}{phrase}" for i, phrase in enumerate(found, start=1))
    return AnsweredTurn(rng.choice(_NAMES).format(text=passage.text), answer)


def _finished(passage: Passage, rng: random.Random) -> AnsweredTurn | None:
    lines = passage.text.split("\n")
    if len(lines) < 4:
        return None
    cut = rng.randint(1, len(lines) // 2)
    prompt = rng.choice(_FINISH_CODE).format(kind=passage.kind, text="\n".join(lines[:cut]))
    code = "\n".join(lines if rng.random() < 0.5 else lines[cut:])  # all of it, or what is missing
    return AnsweredTurn(prompt, f"```{passage.kind}\n{code}\n```")


def _renamed(passage: Passage, rng: random.Random) -> AnsweredTurn | None:
    names = re.findall(r"\b(?!self\b)[a-z_]\w{2,}(?= = |\.|\()", passage.text)
    new_names = [name for name in _NEW_NAMES if name not in passage.text]
    if not names or not new_names:
        return None
    old, new = rng.choice(names), rng.choice(new_names)
    code = re.sub(rf"\b{old}\b", new, passage.text)
    prompt = rng.choice(_RENAME).format(kind=passage.kind, text=passage.text, old=old, new=new)
    return AnsweredTurn(prompt, f"```{passage.kind}\n{code}\n```")


def _sentences(text: str) -> list[str]:
    return [
        s.strip() for s in re.split(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])", " ".join(text.split())) if s.strip()
    ]
