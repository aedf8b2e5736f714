"""OpenVINO GenAI: its continuous-batching pipeline, plain or with prompt lookup, reading the GGUF file."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai
from runner import Answer, Prompt, serve


class OpenVINO:
    """Implements runner.Engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = openvino_genai.__version__
        self.memory_pid = os.getpid()
        self._lookup_tokens = settings["lookup_tokens"]
        self._eos_token_ids = settings["eos_token_ids"]
        scheduler = openvino_genai.SchedulerConfig()
        # As LLMPipeline sets it for latency: no cut through a prompt, prefixes kept.
        scheduler.max_num_batched_tokens = max(8192, settings["max_context"])
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = settings["max_batch"]
        scheduler.cache_size = settings["kv_gib"]
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings["threads"]}
        if self._lookup_tokens:
            properties["prompt_lookup"] = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            settings["gguf"], scheduler, "CPU", properties
        )
        self._tokenizer = self._pipeline.get_tokenizer()

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()

    def generate(self, prompts: Sequence[Prompt], max_tokens: int, ignore_eos: bool) -> list[Answer]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.ignore_eos = ignore_eos
        config.apply_chat_template = False
        config.eos_token_id = self._eos_token_ids[0]
        if not ignore_eos:
            config.stop_token_ids = set(self._eos_token_ids)
        if self._lookup_tokens:
            config.num_assistant_tokens = self._lookup_tokens
            config.max_ngram_size = 3
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        begin = time.perf_counter()
        results = self._pipeline.generate(inputs, [config] * len(inputs))
        seconds = time.perf_counter() - begin
        first = results[0].perf_metrics.get_ttft().mean / 1000 if len(inputs) == 1 else None
        return [Answer(list(result.m_generation_ids[0]), seconds, first) for result in results]

    def close(self) -> None:
        del self._pipeline


if __name__ == "__main__":
    serve(OpenVINO)
