"""The engine's side of a comparison: reads jobs from stdin, one JSON line each, and answers on stdout.

Runs inside the environment of the engine that it drives, so it imports the standard library alone. Every
run_*.py beside it wraps one engine in a class with the methods of `Engine` and hands it to `serve`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO

Prompt = Sequence[int]


@dataclass
class Answer:
    """token_ids: all that were generated, the end-of-sequence token included; seconds from the asking on."""

    token_ids: list[int]
    seconds: float
    time_to_first_token: float | None = None  # None: the engine gave the answer as a whole


class UnsupportedError(Exception):
    """The engine has no such ability; the table shows a gap instead of a failure."""


class Engine(Protocol):
    """What a run_*.py provides."""

    version: str
    memory_pid: int  # the process whose tree is the engine; without the runner where it is a client

    def tokenize(self, text: str) -> list[int]:
        """The ids of a rendered prompt by the engine's own tokenizer, nothing added to it."""
        ...

    def generate(self, prompts: Sequence[Prompt], max_tokens: int, ignore_eos: bool) -> list[Answer]:
        """Greedy answers to all prompts, given to the engine at once; UnsupportedError if it cannot."""
        ...

    def close(self) -> None:
        """Ends every process of the engine."""
        ...


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Loads the engine with the settings of the first line, then does every job until stdin ends.

    What libraries print goes to stderr: the stdout that the jobs are answered on is kept from them.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    begin = time.perf_counter()
    engine = load(settings)
    try:
        _reply(
            replies,
            {
                "version": engine.version,
                "memory_pid": engine.memory_pid,
                "load_seconds": time.perf_counter() - begin,
            },
        )
        for line in sys.stdin:
            try:
                _reply(replies, _do(engine, json.loads(line)))
            except UnsupportedError as error:
                _reply(replies, {"unsupported": str(error)})
    finally:
        engine.close()


def _do(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    if job["do"] == "tokenize":
        return {"token_ids": [engine.tokenize(text) for text in job["texts"]]}
    prompts, batch = job["prompts"], job["batch"]
    answers: list[Answer] = []
    begin = time.perf_counter()
    for first in range(0, len(prompts), batch):
        answers += engine.generate(prompts[first : first + batch], job["max_tokens"], job["ignore_eos"])
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "answers": [asdict(answer) for answer in answers]}


def _reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()
