"""transformers: `generate` of the eager model, a batch padded to the left."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from runner import Answer, Prompt, serve
from transformers.generation.streamers import BaseStreamer


class FirstToken(BaseStreamer):
    """Notes when the first generated token came; the prompt is put before it."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.seconds: float | None = None
        self._puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self.seconds = time.perf_counter() - self.begin

    def end(self) -> None:
        pass


class Transformers:
    """Implements runner.Engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self.version = f"{transformers.__version__}, torch {torch.__version__}"
        self.memory_pid = os.getpid()
        self._eos_token_ids = settings["eos_token_ids"]
        dtype = getattr(torch, settings["dtype"])
        directory = settings["checkpoint"]
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None  # each call says what ends it
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def generate(self, prompts: Sequence[Prompt], max_tokens: int, ignore_eos: bool) -> list[Answer]:
        padding = self._eos_token_ids[0]
        longest = max(map(len, prompts))
        gaps = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor(
            [[padding] * gap + list(prompt) for gap, prompt in zip(gaps, prompts, strict=True)]
        )
        mask = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in gaps])
        streamer = FirstToken() if len(prompts) == 1 else None
        begin = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None if ignore_eos else self._eos_token_ids,
                pad_token_id=padding,
                streamer=streamer,
            )
        seconds = time.perf_counter() - begin
        first = streamer.seconds if streamer else None
        rows = output[:, longest:].tolist()
        return [Answer(row if ignore_eos else self._until_eos(row), seconds, first) for row in rows]

    def _until_eos(self, ids: list[int]) -> list[int]:
        """Without the padding that an answer gets when another of its batch is longer."""
        ends = [position for position, token_id in enumerate(ids) if token_id in self._eos_token_ids]
        return ids[: ends[0] + 1] if ends else ids

    def close(self) -> None:
        del self._model


if __name__ == "__main__":
    serve(Transformers)
