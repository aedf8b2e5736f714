"""Conversations whose prompt holds a passage that is learnt too: what is answered is the whole prompt."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_worker.training.batch_generator import Generation, GenerationRequest
from gpu_worker.training.commands import evaluate as command
from gpu_worker.training.conversations import Conversation, shard_path, write_shard
from gpu_worker.training.extract import Extractor
from gpu_worker.training.features import FeatureShard, feature_path
from gpu_worker.training.offline import OfflineAcceptance
from shared_mem.enums import SpeculationMethod
from shared_mem.records import SamplingRecord

_ASKED, _PASSAGE, _OTHER = (5, 6, 7, 8), (30, 31, 32, 33, 34), (30, 31, 32, 33, 35)


def _told(passage: tuple[int, ...], answer: tuple[int, ...], further: tuple[int, ...] = ()) -> Conversation:
    """A question about a passage and its answer, perhaps with a second question of one token and its answer."""
    ids, start = (*_ASKED, *passage), len(_ASKED)
    spans = [(start, len(ids)), (len(ids), len(ids) + len(answer))]
    ids = (*ids, *answer)
    if further:
        ids = (*ids, 9, *further)
        spans.append((len(ids) - len(further), len(ids)))
    return Conversation(ids, tuple(spans), greedy=True)


def _request(prompt: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(prompt, 2, SamplingRecord(), frozenset())


def test_the_prompt_ends_where_the_answer_begins() -> None:
    assert _told(_PASSAGE, (50, 51)).num_prompt_tokens == 9
    assert _told(_PASSAGE, (50, 51), (60,)).num_prompt_tokens == 9
    assert Conversation((1, 2, 3, 4, 5), ((2, 3), (4, 5)), greedy=True).num_prompt_tokens == 2


def test_a_passage_is_part_of_the_prompt_that_came_before(extractor: Extractor, tmp_path: Path) -> None:
    first, another = _told(_PASSAGE, (50, 51)), _told(_OTHER, (50, 51))
    again, longer = _told(_PASSAGE, (52, 53, 54)), _told(_PASSAGE, (50, 51), (60, 61))
    write_shard(shard_path(tmp_path, 0), [first, again, another])
    write_shard(shard_path(tmp_path, 1), [longer])
    extractor.write(tmp_path, tmp_path / "features")
    shard = FeatureShard(feature_path(tmp_path / "features", 0))
    texts = [shard.read(i, hidden=True, captured=False) for i in range(shard.num_conversations)]
    assert [tuple(text.token_ids.tolist()) for text in texts] == [first.token_ids, another.token_ids]
    assert FeatureShard(feature_path(tmp_path / "features", 1)).num_conversations == 0


def test_evaluate_serves_the_prompt_with_its_passage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(shard_path(tmp_path, 0), [_told(_PASSAGE, (50, 51)), _told(_OTHER, (52,), (60, 61))])
    served: list[list[tuple[int, ...]]] = []

    class Served:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def generate(self, prompts: list[tuple[int, ...]], **_: Any) -> tuple[list[Generation], float]:
            served.append(prompts)
            return [Generation(_request(prompt), (70, 71), True, ((2, 1),)) for prompt in prompts], 1.0

    def measure(texts: list[Conversation]) -> OfflineAcceptance:
        measured.append(texts)
        return OfflineAcceptance([0.5], len(texts), 1.5, 1.0)

    measured: list[list[Conversation]] = []
    loaded = SimpleNamespace(
        evaluator=SimpleNamespace(measure=measure), method=SpeculationMethod.MTP, context=64
    )
    monkeypatch.setattr(command, "_load", lambda *_: loaded)
    monkeypatch.setattr(command, "is_held_out", lambda _: True)
    monkeypatch.setattr(command, "ServedEvaluator", Served)
    command.evaluate(tmp_path, conversations=tmp_path, tokens=2, nodes=3, depth=2, count=5, temperature=0.0)
    prompts = [(*_ASKED, *_PASSAGE), (*_ASKED, *_OTHER)]
    assert served == [prompts] * 2
    # Offline sees the stored texts, then those that the service answered with, of which just the answers count.
    assert [text.token_ids for text in measured[1]] == [(*prompt, 70, 71) for prompt in prompts]
    assert [text.answers for text in measured[1]] == [((9, 11),)] * 2
