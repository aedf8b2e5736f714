"""The tiny random llama, its draft and its own greedy continuations, shared by the losslessness tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_worker.models.base import CausalLM
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from tests.harness.engine import InProcessEngine

NUM_TOKENS = 48


@pytest.fixture(scope="session")
def tiny(tiny_model_dir: Path) -> CausalLM:
    """The tiny model in float32."""
    return load_model(resolve_model(str(tiny_model_dir)), "float32", torch.device("cpu"))


@pytest.fixture(scope="session")
def prompts(tiny: CausalLM) -> list[list[int]]:
    """Prompts of 3 to 30 ids, some repetitive enough for n-gram lookup."""
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randint(3, 290, (n,), generator=generator).tolist() for n in (3, 4, 8, 11, 17, 30)]
    return [*drawn, [5, 6, 7, 8, 9] * 4, [11, 12] * 6]


@pytest.fixture(scope="session")
def references(tiny: CausalLM, prompts: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """Prompt -> the greedy ids that speculation off gives."""
    engine = InProcessEngine(tiny)
    ids = engine.generate(prompts, max_tokens=NUM_TOKENS)
    return {tuple(prompt): generated for prompt, generated in zip(prompts, ids, strict=True)}


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """For tests of small tensors: a second thread costs more in waiting than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
