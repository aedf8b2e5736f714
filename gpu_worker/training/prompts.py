"""Prompts from a file of JSON lines (messages, ShareGPT, turns, plain text); only users' turns are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_worker.training.errors import TrainingError

_TEXT_KEYS = ("prompt", "text", "instruction", "question")
_USERS = ("user", "human")


def read_prompts(path: Path) -> list[tuple[str, ...]]:
    """The users' turns of each line, in order; lines that repeat an earlier one are left out.

    A line is a string, or an object with `messages` [{role, content}], `conversations` [{from, value}] (ShareGPT),
    `turns` [text] (MT-bench) or one of the keys prompt, text, instruction, question. Raises TrainingError naming the
    line that is none of these.
    """
    prompts: dict[tuple[str, ...], None] = {}  # in order, without repeats
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                turns = _turns(_parsed(line, path, number))
                if not turns:
                    raise TrainingError(
                        f"{path}:{number}: no user's turn in messages, conversations, turns or text"
                    )
                prompts[turns] = None
    except OSError as error:
        raise TrainingError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TrainingError(f"{path}: not UTF-8: {error}") from error
    if not prompts:
        raise TrainingError(f"{path}: holds no prompts")
    return list(prompts)


def _parsed(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise TrainingError(f"{path}:{number}: not JSON: {error}") from error


def _turns(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    if not isinstance(value, dict):
        return ()
    for key, who, what in (("messages", "role", "content"), ("conversations", "from", "value")):
        if isinstance(value.get(key), list):
            turns = [turn for turn in value[key] if isinstance(turn, dict) and turn.get(who) in _USERS]
            return tuple(str(turn[what]) for turn in turns if isinstance(turn.get(what), str))
    if isinstance(value.get("turns"), list):
        return tuple(turn for turn in value["turns"] if isinstance(turn, str) and turn.strip())
    for key in _TEXT_KEYS:
        if isinstance(value.get(key), str) and value[key].strip():
            return (value[key],)
    return ()
