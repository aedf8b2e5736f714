"""Acceptance as served, and the evaluate command over a head that fit wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_worker.models.heads.config import HeadKind
from gpu_worker.training.batch_generator import Generation, GenerationRequest
from gpu_worker.training.commands.evaluate import evaluate, held_out_greedy
from gpu_worker.training.conversations import Conversation, shard_path, write_shard
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.export import export_head
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.served import summarize
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from shared_mem.records import SamplingRecord
from tests.gpu_worker.forwarding import prompt_logits
from tests.gpu_worker.training.samples import draft_objective, random_conversations
from tests.models import IM_END_ID


def test_steps_are_counted_by_how_deep_they_drafted() -> None:
    request = GenerationRequest((1,), 9, SamplingRecord(), frozenset())
    generations = [
        Generation(request, (1, 2, 3, 4), False, ((3, 3), (2, 0))),
        Generation(request, (5, 6), True, ((3, 1),)),
    ]
    found = summarize(generations, 2.0)
    assert found.acceptance == [pytest.approx(2 / 3), pytest.approx(1 / 3), pytest.approx(1 / 2)]
    assert found.acceptance_length == pytest.approx(1 + 4 / 3)
    assert found.tokens_per_second == 3.0
    assert summarize([], 1.0).acceptance_length == 1.0


def test_only_held_out_greedy_conversations_are_measured(tmp_path: Path) -> None:
    conversations = random_conversations(600, seed=9)
    write_shard(shard_path(tmp_path, 0), conversations)
    chosen = held_out_greedy(tmp_path, 100)
    assert 0 < len(chosen) < 40
    assert all(one.greedy for one in chosen)
    write_shard(shard_path(tmp_path, 0), [one for one in conversations if one not in chosen])
    with pytest.raises(TrainingError, match="no held-out greedy conversation"):
        held_out_greedy(tmp_path, 100)


@pytest.mark.parametrize("kind", [HeadKind.EAGLE3, HeadKind.MEDUSA])
def test_a_head_is_evaluated_offline_and_served(
    kind: HeadKind,
    frozen: FrozenTarget,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both measure the same texts with the same implementation, so both see the same steps."""
    objective, vocab = draft_objective(kind, frozen)
    head = objective.head
    export_head(tmp_path / "head", head, head.config, vocab.ids, "card")
    target = load_model(resolve_model(str(tiny_model_dir)), "float32", "cpu")
    monkeypatch.setattr("gpu_worker.training.commands.evaluate.is_held_out", lambda ids: True)
    conversations = []
    for first in (3, 60):
        ids = [first, 5, 9]
        while len(ids) < 40 and ids[-1] != IM_END_ID:
            ids.append(int(prompt_logits(target, ids)[-1].argmax()))
        conversations.append(Conversation(tuple(ids), ((3, len(ids)),), greedy=True))
    write_shard(shard_path(tmp_path, 0), conversations)
    evaluate(
        tmp_path / "head",
        model=str(tiny_model_dir),
        conversations=tmp_path,
        dtype="float32",
        count=2,
        tokens=3,
        nodes=6,
        depth=3,
        answer_tokens=37,
        temperature=0.0,
        served=True,
        threads=1,
    )
    found = json.loads((tmp_path / "head" / "evaluation.json").read_text())
    assert found["conversations"] == len(conversations)
    offline, chain = found["offline chain"], found["served chain of 3"]
    assert len(offline["acceptance"]) == 3
    assert chain["acceptance_length"] == pytest.approx(offline["acceptance_length"], abs=0.2)
    again = found["offline chain, texts as served"]
    assert again["starts"] == offline["starts"]
    assert again["acceptance"] == offline["acceptance"]  # both are the target's greedy texts
    assert found["served tree of 6"]["acceptance_length"] >= 1.0
