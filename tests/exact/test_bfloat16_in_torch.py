"""bfloat16 in torch, what GPUs serve in: whatever is kept between steps fits the products that read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_worker.models.base import CausalLM
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from tests.exact.drafted_engines import make_engine
from tests.harness.engine import InProcessEngine
from tests.harness.tiny_heads import KINDS

PROMPT = [5, 6, 7, 8, 9] * 3


@pytest.fixture(scope="module")
def rounded(tiny_model_dir: Path) -> CausalLM:
    """The tiny model in bfloat16, without kernels of its own."""
    return load_model(resolve_model(str(tiny_model_dir)), "bfloat16", torch.device("cpu"))


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", [*KINDS, "medusa", "draft-model-of-some-ids"])
def test_every_drafter_works_on_rounded_states(
    kind: str, shape: str, rounded: CausalLM, tiny_model_dir: Path
) -> None:
    engine = make_engine(f"{kind}/{shape}", rounded, {}, tiny_model_dir)
    request = engine.submit(PROMPT, max_tokens=12)
    output = engine.run()[request, 0]
    assert output.token_ids == InProcessEngine(rounded).generate([PROMPT], max_tokens=12)[0]
    assert output.num_draft_tokens > 0
