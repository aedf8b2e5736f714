"""llama.cpp through its Python binding: `Llama.generate` alone, its batch calls for several sequences."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from runner import Answer, Prompt, UnsupportedError, serve

_BATCH_TOKENS = 2048  # tokens of one llama_decode call, as llama-server has it


class LlamaCpp:
    """Implements runner.Engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = llama_cpp.__version__
        self.memory_pid = os.getpid()
        self._settings = settings
        self._lookup_tokens = settings["lookup_tokens"]
        draft = (
            LlamaPromptLookupDecoding(num_pred_tokens=self._lookup_tokens) if self._lookup_tokens else None
        )
        self._llama = llama_cpp.Llama(
            settings["gguf"],
            n_ctx=settings["max_context"],
            n_batch=_BATCH_TOKENS,
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            logits_all=draft is not None,
            draft_model=draft,
            verbose=False,
        )
        self._parallel: _Parallel | None = None

    def tokenize(self, text: str) -> list[int]:
        return self._llama.tokenize(text.encode(), add_bos=False, special=True)

    def generate(self, prompts: Sequence[Prompt], max_tokens: int, ignore_eos: bool) -> list[Answer]:
        if len(prompts) == 1:
            return [self._one(list(prompts[0]), max_tokens, ignore_eos)]
        if self._lookup_tokens:
            raise UnsupportedError("its prompt lookup takes one sequence")
        if not ignore_eos:
            raise UnsupportedError("several sequences are driven to an equal length")
        if self._parallel is None or self._parallel.num_sequences != len(prompts):
            if self._parallel is not None:
                self._parallel.close()
            self._parallel = _Parallel(self._llama, len(prompts), self._settings)
        return self._parallel.generate(prompts, max_tokens)

    def _one(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Answer:
        ends = () if ignore_eos else tuple(self._settings["eos_token_ids"])
        answer = Answer([], 0.0)
        begin = time.perf_counter()
        for token_id in self._llama.generate(prompt, temp=0.0):
            if not answer.token_ids:
                answer.time_to_first_token = time.perf_counter() - begin
            answer.token_ids.append(token_id)
            if len(answer.token_ids) == max_tokens or token_id in ends:
                break
        answer.seconds = time.perf_counter() - begin
        return answer

    def close(self) -> None:
        if self._parallel is not None:
            self._parallel.close()
        self._llama.close()


class _Parallel:
    """A second context of the same model for `num_sequences` sequences, decoded in step."""

    def __init__(self, llama: llama_cpp.Llama, num_sequences: int, settings: dict[str, Any]) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_sequences * settings["max_context"]
        params.n_batch = _BATCH_TOKENS
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = settings["threads"]
        self.num_sequences = num_sequences
        self._context = llama_cpp.llama_init_from_model(llama.model, params)
        if not self._context:
            raise MemoryError(
                f"llama.cpp has no context for {num_sequences} sequences of {params.n_ctx} tokens"
            )
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self._vocab_size = llama.n_vocab()

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Answer]:
        begin = time.perf_counter()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        answers = [Answer([], 0.0) for _ in prompts]
        for sequence, token_id in self._prefill(prompts):
            answers[sequence].token_ids.append(token_id)
        for step in range(max_tokens - 1):
            rows = [
                (answer.token_ids[-1], len(prompt) + step, sequence, True)
                for sequence, (answer, prompt) in enumerate(zip(answers, prompts, strict=True))
            ]
            for sequence, token_id in self._decode(rows):
                answers[sequence].token_ids.append(token_id)
        seconds = time.perf_counter() - begin
        for answer in answers:
            answer.seconds = seconds
        return answers

    def _prefill(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, int]]:
        rows = [
            (token_id, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        for first in range(0, len(rows), _BATCH_TOKENS):
            yield from self._decode(rows[first : first + _BATCH_TOKENS])

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """One pass over rows (token id, position, sequence, wants logits): (sequence, greedy next token)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token_id, position, sequence, wants_logits) in enumerate(rows):
            batch.token[row] = token_id
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = wants_logits
        if (code := llama_cpp.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        sequences = [sequence for _, _, sequence, wants_logits in rows if wants_logits]
        if not sequences:
            return []
        shape = (len(sequences), self._vocab_size)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=shape)
        return list(zip(sequences, logits.argmax(axis=1).tolist(), strict=True))

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)


if __name__ == "__main__":
    serve(LlamaCpp)
