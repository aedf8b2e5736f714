"""Steps planned while others are in flight, drafted in every way, give what single plain steps give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.models.base import CausalLM
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from scheduler_svc.messages import Sampling, Stopping
from shared_mem.enums import FinishReason
from tests.exact.drafted_engines import NAMES, make_engine
from tests.harness.engine import InProcessEngine, Output
from tests.models import make_tiny_llama

References = dict[tuple[int, ...], list[int]]

SEEDED = Sampling(1.0, 0, 1.0, 0.0, 0.5, 0.7, 1.3, 11)

REQUESTS: dict[str, dict[str, object]] = {
    "greedy": {"max_tokens": 20},
    "seeded with penalties": {"max_tokens": 20, "sampling": SEEDED},
    "one token": {"max_tokens": 1, "num_logprobs": 1},
    "two tokens": {"max_tokens": 2, "num_logprobs": 1},
    "logprobs": {"max_tokens": 17, "num_logprobs": 3, "num_prompt_logprobs": 1},
    "stop ids": {"stopping": Stopping(40, stop_token_ids=tuple(range(3, 60))), "num_logprobs": 0},
    "end of text and min_tokens": {"stopping": Stopping(30, min_tokens=6)},
    "two samples": {"max_tokens": 9, "sampling": SEEDED, "seeds": (1, 2)},
}
EOS = tuple(range(60, 90))


def assert_same(got: Output, expected: Output) -> None:
    """Ids, log-probabilities and the end."""
    assert got.token_ids == expected.token_ids
    assert got.finished is not None
    assert expected.finished is not None
    assert (got.finished.reason, got.finished.stop_token_id) == (
        expected.finished.reason,
        expected.finished.stop_token_id,
    )
    for ours, theirs in (
        (got.logprobs, expected.logprobs),
        (got.prompt_logprobs or (), expected.prompt_logprobs or ()),
    ):
        assert [p.token_id for p in ours] == [p.token_id for p in theirs]
        assert [[t for t, _ in p.top] for p in ours] == [[t for t, _ in p.top] for p in theirs]
        np.testing.assert_allclose([p.logprob for p in ours], [p.logprob for p in theirs], atol=1e-4)


def assert_idle(engine: InProcessEngine) -> None:
    """Every page is free again."""
    engine.scheduler.flush_prefix_cache()
    engine.scheduler.check_integrity()
    assert engine.scheduler._allocator.ledger.num_free == engine.limits.num_pages


def compare(
    planned_ahead: InProcessEngine,
    plain: InProcessEngine,
    prompts: list[list[int]],
    requests: dict[str, dict[str, object]],
) -> dict[tuple[str, int], Output]:
    """Submits every prompt with every kind of request to both, and compares all outputs."""
    for engine in (planned_ahead, plain):
        for fields in requests.values():
            for prompt in prompts:
                engine.submit(prompt, **fields)  # type: ignore[arg-type]
    outputs, expected = planned_ahead.run(), plain.run()
    assert outputs.keys() == expected.keys()
    for key, output in outputs.items():
        assert_same(output, expected[key])
    assert_idle(planned_ahead)
    return outputs


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_request(
    name: str, tiny: CausalLM, prompts: list[list[int]], references: References
) -> None:
    engine = make_engine(name, tiny, references, steps_in_flight=2, eos_token_ids=EOS)
    plain = InProcessEngine(tiny, eos_token_ids=EOS)
    outputs = compare(engine, plain, prompts, REQUESTS)
    reasons = {output.finished.reason for output in outputs.values() if output.finished is not None}
    assert reasons == {FinishReason.LENGTH, FinishReason.STOP, FinishReason.EOS}
    assert sum(output.num_draft_tokens for output in outputs.values()) > 0
    if name.startswith("oracle"):
        assert sum(output.num_accepted_tokens for output in outputs.values()) > 100


@pytest.mark.parametrize("name", ["ngram", "draft-model", "oracle", "junk-tree"])
def test_a_small_pool_that_preempts(
    name: str, tiny: CausalLM, prompts: list[list[int]], references: References
) -> None:
    engine = make_engine(
        name, tiny, references, steps_in_flight=2, num_pages=40, max_running_requests=6, max_batched_tokens=24
    )
    kinds = {
        "greedy": {"max_tokens": 40},
        "seeded": {"max_tokens": 30, "sampling": SEEDED, "num_logprobs": 0},
    }
    compare(engine, InProcessEngine(tiny), prompts, kinds)
    assert engine.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("page_size", [4, 5])
@pytest.mark.parametrize("name", ["ngram", "draft-model", "oracle", "junk", "junk-tree"])
def test_the_context_limit_is_reached_and_never_crossed(
    name: str, page_size: int, tiny: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 57..63 tokens in a context of 64; drafts in flight may or may not have reached its end."""
    generator = np.random.default_rng(3)
    prompts = [generator.integers(3, 290, length).tolist() for length in range(57, 64)]
    texts = InProcessEngine(tiny, max_context_tokens=64).generate(prompts, max_tokens=100)
    references = {tuple(prompt): text for prompt, text in zip(prompts, texts, strict=True)}
    engine = make_engine(
        name, tiny, references, steps_in_flight=2, max_context_tokens=64, page_size=page_size
    )
    highest: list[int] = []
    forward = tiny.forward_capturing

    def watching(batch, pool, attention, layers):  # type: ignore[no-untyped-def]
        highest.append(int(batch.positions.max()))
        return forward(batch, pool, attention, layers)

    monkeypatch.setattr(tiny, "forward_capturing", watching)
    plain = InProcessEngine(tiny, max_context_tokens=64)
    outputs = compare(engine, plain, prompts, {"greedy": {"max_tokens": 100, "num_logprobs": 1}})
    assert max(highest) <= 63
    assert [len(output.token_ids) for output in outputs.values()] == [64 - len(prompt) for prompt in prompts]
    assert all(
        output.finished and output.finished.reason is FinishReason.LENGTH for output in outputs.values()
    )


def test_the_draft_models_own_limit(tmp_path: Path, tiny: CausalLM) -> None:
    """A draft of 32 positions beside a context of 64: no position of it ever reaches the limit."""
    directory = make_tiny_llama(tmp_path / "draft", num_layers=1, max_position_embeddings=32)
    draft = load_model(resolve_model(str(directory)), "float32", torch.device("cpu"))
    positions: list[int] = []
    forward = draft.forward

    def watching(batch, pool, attention):  # type: ignore[no-untyped-def]
        positions.extend(batch.positions.tolist())
        return forward(batch, pool, attention)

    draft.forward = watching  # type: ignore[method-assign]
    generator = np.random.default_rng(1)
    prompts = [generator.integers(3, 290, length).tolist() for length in (20, 26, 30, 31, 33)]
    engine = InProcessEngine(tiny, draft=draft, max_context_tokens=64, steps_in_flight=2)
    plain = InProcessEngine(tiny, max_context_tokens=64)
    compare(engine, plain, prompts, {"greedy": {"max_tokens": 100}})
    assert max(positions) <= 31


def test_long_prompts_in_chunks_beside_decoding(
    tiny: CausalLM, prompts: list[list[int]], references: References
) -> None:
    """While a chunk is in flight the next one is planned already, and decode rows that draft beside it."""
    long_prompt = np.random.default_rng(0).integers(3, 290, 150).tolist()
    engine = make_engine("draft-model", tiny, references, steps_in_flight=2, max_batched_tokens=24)
    compare(
        engine, InProcessEngine(tiny), [*prompts[:3], long_prompt, *prompts[3:]], {"": {"max_tokens": 20}}
    )
