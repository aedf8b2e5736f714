"""Texts through the model runner: equal to plain greedy decoding, in resumed shards, from prompts of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_worker.config import WorkerConfig
from gpu_worker.engine import build_engine
from gpu_worker.training.batch_generator import BatchGenerator, GenerationRequest
from gpu_worker.training.chat import ChatTemplate
from gpu_worker.training.conversations import read_shard, shard_path, shard_paths
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.prompts import read_prompts
from gpu_worker.training.synthesize import SynthesisSettings, Synthesizer
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from shared_mem.records import SamplingRecord
from tests.gpu_worker.forwarding import prompt_logits
from tests.models import IM_END_ID

_CONTEXT, _PAGE, _SLOTS = 160, 16, 3


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path):
    pages = _SLOTS * -(-(_CONTEXT + 1) // _PAGE)
    return build_engine(
        WorkerConfig(
            model=str(tiny_model_dir),
            dtype="float32",
            device="cpu",
            speculation=(),
            num_pages=pages,
            max_running_requests=_SLOTS,
            max_context_tokens=_CONTEXT,
        )
    )


def _generator(engine) -> BatchGenerator:
    return BatchGenerator(
        engine.runner,
        num_slots=_SLOTS,
        page_size=_PAGE,
        num_pages=engine.num_pages,
        max_context_tokens=_CONTEXT,
        max_batched_tokens=32,
    )


def test_batched_texts_are_those_of_plain_greedy_decoding(engine, tiny_model_dir: Path) -> None:
    model = load_model(resolve_model(str(tiny_model_dir)), "float32", "cpu")
    prompts = [tuple(range(5, 5 + n)) for n in (3, 40, 17, 1, 9)]
    generator = _generator(engine)
    for prompt in prompts:
        generator.submit(GenerationRequest(prompt, 12, SamplingRecord(), frozenset({IM_END_ID})))
    found = {one.request.token_ids: one.token_ids for one in generator.run()}
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + 12 and ids[-1] != IM_END_ID:
            ids.append(int(prompt_logits(model, ids)[-1].argmax()))
        assert found[prompt] == tuple(ids[len(prompt) :])


def _synthesizer(engine, prompts=None, count: int = 4) -> Synthesizer:
    settings = SynthesisSettings(
        count, shard_size=2, max_prompt_tokens=20, max_answer_tokens=10, greedy_share=0.5
    )
    chat = ChatTemplate(Path(engine.facts.tokenizer_path))
    return Synthesizer(_generator(engine), chat, frozenset(engine.facts.eos_token_ids), settings, prompts)


def test_given_prompts_are_answered_and_missing_shards_resumed(engine, tmp_path: Path) -> None:
    prompts = [("hello there",), ("one", "two"), ("x" * 400,), ("the quick brown fox",)]
    told = []
    written = _synthesizer(engine, prompts).write(tmp_path, lambda *facts: told.append(facts))
    assert written == told[-1][1] > 0
    first, second = (list(read_shard(path)) for path in shard_paths(tmp_path))
    assert len(first) == 2
    assert len(second) == 1  # the long one has no room for an answer
    chat = ChatTemplate(Path(engine.facts.tokenizer_path))
    starts = {tuple(chat.prompt([{"role": "user", "content": turns[0]}])) for turns in prompts}
    for conversation in first + second:
        (start, stop), *_ = conversation.answers
        assert conversation.token_ids[:start] in starts
        assert 0 < stop - start <= 10
    before = shard_path(tmp_path, 1).read_bytes()
    shard_path(tmp_path, 1).unlink()
    _synthesizer(engine, prompts).write(tmp_path, lambda *facts: None)
    assert shard_path(tmp_path, 1).read_bytes() == before


def test_prompts_of_every_layout(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
        {"conversations": [{"from": "human", "value": "b"}, {"from": "gpt", "value": "c"}]},
        {"prompt": "d"},
        "e",
        {"text": "d"},
        {"messages": [{"role": "user", "content": t} for t in ("f", "g")]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    assert read_prompts(path) == [("a",), ("b",), ("d",), ("e",), ("f", "g")]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", ":1: not JSON"), ('{"other": 1}', ":1: no user's turn"), ("", "holds no prompts")],
)
def test_a_file_of_something_else_is_an_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TrainingError, match=message):
        read_prompts(path)
