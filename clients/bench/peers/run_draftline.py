"""Draftline: a server of its own, asked over gRPC by the Python client in this process."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import psutil
from draftline import AsyncClient, Delta, GenerateOptions
from runner import Answer, Prompt, serve
from speed_table import local_server


class Draftline:
    """Implements runner.Engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = importlib.metadata.version("draftline")
        self._lookup_tokens = settings["lookup_tokens"]
        flags = ["--speculation", "off"]
        if self._lookup_tokens:
            flags = ["--speculation", "ngram", "--num-draft-tokens", str(self._lookup_tokens)]
        self._resources = ExitStack()
        self._loop = self._resources.enter_context(asyncio.Runner())
        # The caller's flags come last: of a flag given twice the last one counts.
        server = local_server(*flags, "--model", settings["gguf"], *settings["server_flags"])
        self._address = self._resources.enter_context(server)
        # The client in this process is the measuring side, as the peers' callers are: the server alone counts.
        self.memory_pid = psutil.Process().children()[0].pid
        self._client = self._loop.run(self._connect())

    async def _connect(self) -> AsyncClient:
        return AsyncClient(self._address)

    def tokenize(self, text: str) -> list[int]:
        return self._loop.run(self._client.tokenize(text))

    def generate(self, prompts: Sequence[Prompt], max_tokens: int, ignore_eos: bool) -> list[Answer]:
        options = GenerateOptions(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            speculation="ngram" if self._lookup_tokens else "off",
            token_ids=True,
        )
        return self._loop.run(self._all(prompts, options))

    async def _all(self, prompts: Sequence[Prompt], options: GenerateOptions) -> list[Answer]:
        return await asyncio.gather(*(self._one(prompt, options) for prompt in prompts))

    async def _one(self, prompt: Prompt, options: GenerateOptions) -> Answer:
        begin = time.perf_counter()
        answer = Answer([], 0.0)
        async with self._client.generate(prompt, options) as stream:
            async for event in stream:
                if isinstance(event, Delta) and event.token_ids:
                    answer.seconds = time.perf_counter() - begin
                    if not answer.token_ids:
                        answer.time_to_first_token = answer.seconds
                    answer.token_ids += event.token_ids
        return answer

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._resources.close()


if __name__ == "__main__":
    serve(Draftline)
