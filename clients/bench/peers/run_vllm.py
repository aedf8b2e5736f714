"""vLLM on the CPU: its engine stepped from here, so that the first token's time is seen."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from runner import Answer, Prompt, serve


class VLLM:
    """Implements runner.Engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))  # else it keeps a core for itself
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings["kv_gib"])
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        import vllm  # reads the environment when it is imported

        self._sampling_params = vllm.SamplingParams
        self.version = vllm.__version__
        self.memory_pid = os.getpid()
        self._eos_token_ids = settings["eos_token_ids"]
        self._num_requests = 0
        self._llm = vllm.LLM(
            settings["checkpoint"],
            dtype=settings["dtype"],
            max_model_len=settings["max_context"],
            max_num_seqs=settings["max_batch"],
        )

    def tokenize(self, text: str) -> list[int]:
        return list(self._llm.get_tokenizer().encode(text, add_special_tokens=False))

    def generate(self, prompts: Sequence[Prompt], max_tokens: int, ignore_eos: bool) -> list[Answer]:
        params = self._sampling_params(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=[] if ignore_eos else self._eos_token_ids,
        )
        engine = self._llm.llm_engine
        answers: dict[str, Answer] = {}
        begin = time.perf_counter()
        for prompt in prompts:
            self._num_requests += 1
            answers[str(self._num_requests)] = Answer([], 0.0)
            engine.add_request(str(self._num_requests), {"prompt_token_ids": list(prompt)}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                answer = answers[output.request_id]
                answer.seconds = time.perf_counter() - begin
                if answer.time_to_first_token is None:
                    answer.time_to_first_token = answer.seconds
                answer.token_ids = list(output.outputs[0].token_ids)
        return list(answers.values())

    def close(self) -> None:
        del self._llm


if __name__ == "__main__":
    serve(VLLM)
