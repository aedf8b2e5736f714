"""The tiny random llama, its draft and its own greedy continuations, shared by the losslessness tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_worker.kernels import native
from gpu_worker.kernels.native import ThreadTeam
from gpu_worker.models.base import CausalLM
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from tests.harness.engine import InProcessEngine
from tests.models import make_tiny_llama

NUM_TOKENS = 48
# One layer more than the draft; sizes that are no multiples of the kernels' blocks are in the kernels' own tests.
SIZES = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


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


@pytest.fixture(scope="module")
def native_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's directory."""
    return make_tiny_llama(tmp_path_factory.mktemp("native"), **SIZES)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["int8", "bfloat16"])
def native_model(request: pytest.FixtureRequest, native_dir: Path) -> CausalLM:
    """A tiny model on the CPU kernels, two threads."""
    kernels = native.load()
    if kernels is None:
        pytest.skip("installed without a C++ compiler")
    return load_model(
        resolve_model(str(native_dir)), request.param, torch.device("cpu"), ThreadTeam(kernels, 2)
    )


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """For tests of small tensors: a second thread costs more in waiting than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
