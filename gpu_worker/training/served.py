"""Acceptance as served: the model runner generates the answers anew, drafting with the head that is to be measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpu_worker.config import LayerIdsName, WorkerConfig
from gpu_worker.engine import build_engine
from gpu_worker.training.batch_generator import BatchGenerator, Generation, GenerationRequest
from shared_mem.enums import SpeculationMethod
from shared_mem.records import SamplingRecord

_SLOTS = 4
_PAGE_SIZE = 16
_SPARE_TOKENS = 64  # of the context, for drafts behind the last token


@dataclass(frozen=True)
class ServedAcceptance:
    """acceptance[k]: share of steps that drafted beyond depth k whose first k + 1 drafts were accepted."""

    acceptance: list[float]
    steps: int  # that drafted
    acceptance_length: float  # tokens of such a step
    tokens_per_second: float


class ServedEvaluator:
    """An engine with one head; loads it all at construction."""

    def __init__(
        self,
        model: str,
        dtype: str,
        method: SpeculationMethod,
        path: str,
        *,
        num_draft_tokens: int,
        tree_depth: int | None = None,
        layer_ids_name: LayerIdsName = "inputs",
        max_context_tokens: int = 1024,
        num_threads: int = 0,
    ) -> None:
        """path: the head's (draft-model: the model's) directory; "" for a method that needs none.

        tree_depth: drafts are trees of at most so many levels and num_draft_tokens nodes, not chains.
        """
        self._method, self._num_draft_tokens = method, num_draft_tokens
        pages_per_slot = -(-(max_context_tokens + 1) // _PAGE_SIZE)
        draft_model = path if method is SpeculationMethod.DRAFT_MODEL else ""
        speculation = () if method is SpeculationMethod.DISABLED else (method,)
        self._engine = build_engine(
            WorkerConfig(
                model=model,
                dtype=dtype,
                speculation=speculation,
                num_draft_tokens=num_draft_tokens,
                draft_model=draft_model,
                heads=((method, path),) if path and not draft_model else (),
                eagle3_layer_ids=layer_ids_name,
                draft_shape="chain" if tree_depth is None else "tree",
                max_draft_depth=tree_depth or num_draft_tokens,
                min_draft_probability=0.0,  # as offline: every draft counts
                page_size=_PAGE_SIZE,
                num_pages=_SLOTS * pages_per_slot,
                max_running_requests=_SLOTS,
                max_context_tokens=max_context_tokens,
                num_threads=num_threads,
            )
        )
        self._max_tokens = max_context_tokens - _SPARE_TOKENS
        self._generator = BatchGenerator(
            self._engine.runner,
            num_slots=_SLOTS,
            page_size=_PAGE_SIZE,
            num_pages=_SLOTS * pages_per_slot,
            max_context_tokens=max_context_tokens,
            max_batched_tokens=512,
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], *, temperature: float = 0.0, max_tokens: int = 256
    ) -> tuple[list[Generation], float]:
        """Answers each prompt once, in how many seconds; one that leaves no room for an answer is left out."""
        ends = frozenset(self._engine.facts.eos_token_ids)
        for seed, prompt in enumerate(prompts):
            if len(prompt) + max_tokens <= self._max_tokens:
                sampling = (
                    SamplingRecord(temperature=temperature, seed=seed) if temperature else SamplingRecord()
                )
                self._generator.submit(
                    GenerationRequest(
                        tuple(prompt), max_tokens, sampling, ends, self._method, self._num_draft_tokens
                    )
                )
        started = time.monotonic()
        done = self._generator.run()
        return done, time.monotonic() - started


def summarize(generations: Sequence[Generation], seconds: float) -> ServedAcceptance:
    """Drafts that hung over an answer's end are counted as the steps report them."""
    steps = np.array([step for one in generations for step in one.steps], dtype=np.int64).reshape(-1, 2)
    depths, accepted = steps[:, 0], steps[:, 1]
    acceptance = [float((accepted[depths > k] > k).mean()) for k in range(int(depths.max(initial=0)))]
    tokens = sum(len(one.token_ids) for one in generations)
    length = 1.0 + float(accepted.mean()) if len(steps) else 1.0
    return ServedAcceptance(acceptance, len(steps), length, tokens / seconds)
