"""On the CPU kernels a row's result does not depend on its neighbours: speculation changes not one bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker.models.base import CausalLM
from tests.exact.drafted_engines import HEAD_NAMES, NAMES, make_engine
from tests.exact.test_lossless_tiny import FEATURES
from tests.harness.engine import InProcessEngine


@pytest.mark.parametrize("name", [*NAMES, *HEAD_NAMES])
def test_every_feature_equals_speculation_off_bit_for_bit(
    name: str, native_model: CausalLM, native_dir: Path, prompts: list[list[int]]
) -> None:
    """Ids, log-probabilities and ends, each prompt with each feature, all in one batch of mixed requests."""
    plain = InProcessEngine(native_model, page_size=16)
    greedy = plain.generate(prompts, max_tokens=48)
    references = {tuple(prompt): ids for prompt, ids in zip(prompts, greedy, strict=True)}
    drafted = make_engine(name, native_model, references, native_dir, page_size=16)
    ids = []
    for fields in FEATURES.values():
        for prompt in prompts:
            settings = {"max_tokens": 20} | fields
            ids.append((drafted.submit(prompt, **settings), plain.submit(prompt, **settings)))  # type: ignore[arg-type]
    drafted_outputs, plain_outputs = drafted.run(), plain.run()
    for drafted_id, plain_id in ids:
        a, b = drafted_outputs[drafted_id, 0], plain_outputs[plain_id, 0]
        assert a.token_ids == b.token_ids
        assert a.finished is not None
        assert b.finished is not None
        assert a.finished.reason is b.finished.reason
        assert a.logprobs == b.logprobs
        assert a.prompt_logprobs == b.prompt_logprobs
    assert sum(output.num_draft_tokens for output in drafted_outputs.values()) > 0


def test_a_small_pool_and_a_warm_cache_change_no_bit(
    native_model: CausalLM, prompts: list[list[int]]
) -> None:
    """Preemption computes tokens again in other batches, a prefix hit skips them: the bits are the same."""
    fields = {"max_tokens": 40, "num_logprobs": 2}
    plain = InProcessEngine(native_model, page_size=4)
    ids = [plain.submit(prompt, **fields) for prompt in prompts]  # type: ignore[arg-type]
    outputs = plain.run()
    expected = [(outputs[i, 0].token_ids, outputs[i, 0].logprobs) for i in ids]
    small = InProcessEngine(
        native_model, draft=native_model.truncated(1), num_pages=40, max_running_requests=6, page_size=4
    )
    for _ in range(2):
        ids = [small.submit(prompt, **fields) for prompt in prompts]  # type: ignore[arg-type]
        outputs = small.run()
        assert [(outputs[i, 0].token_ids, outputs[i, 0].logprobs) for i in ids] == expected
    assert small.scheduler.counters.num_preemptions > 0
