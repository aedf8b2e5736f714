"""Acceptance as served, and the evaluate command over a head that fit wrote."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from gpu_worker.models.heads.config import HeadKind
from gpu_worker.training.batch_generator import Generation, GenerationRequest
from gpu_worker.training.commands.evaluate import evaluate, held_out_greedy
from gpu_worker.training.conversations import Conversation, shard_path, write_shard
from gpu_worker.training.dataset import is_held_out
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
    chosen, num_repeating = held_out_greedy(tmp_path, 100)
    assert num_repeating == 0
    assert 0 < len(chosen) < 40
    assert all(one.greedy for one in chosen)
    write_shard(shard_path(tmp_path, 0), [one for one in conversations if one not in chosen])
    with pytest.raises(TrainingError, match="no held-out greedy conversation"):
        held_out_greedy(tmp_path, 100)


def test_what_training_says_is_not_measured(tmp_path: Path) -> None:
    """By the rule of the data set, in whatever shard training says it."""
    made: dict[bool, list[Conversation]] = {True: [], False: []}  # by whether they are held out
    rng = random.Random(4)
    while len(made[True]) < 2:
        ids = tuple(rng.randrange(3, 200) for _ in range(40))
        conversation = Conversation(ids, ((6, 40),), greedy=True)
        made[is_held_out(conversation.token_array)].append(conversation)
    (repeated, new), others = made[True], made[False]
    saying = (Conversation((first, *repeated.token_ids[6:]), ((1, 35),), False) for first in range(3, 200))
    said = next(one for one in saying if not is_held_out(one.token_array))
    write_shard(shard_path(tmp_path, 0), [repeated, new, *others])
    assert held_out_greedy(tmp_path, 9) == ([repeated, new], 0)
    write_shard(shard_path(tmp_path, 1), [said])
    assert held_out_greedy(tmp_path, 9) == ([new], 1)
    assert held_out_greedy(tmp_path, 1) == ([new], 1)
    write_shard(shard_path(tmp_path, 0), [repeated, *others])
    with pytest.raises(TrainingError, match="but 1 that say what training learns"):
        held_out_greedy(tmp_path, 9)


@pytest.mark.parametrize("kind", [HeadKind.EAGLE3, HeadKind.MEDUSA])
def test_a_head_is_evaluated_offline_and_served(
    kind: HeadKind,
    frozen: FrozenTarget,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is served is measured offline too: those texts, not the ones that the conversations have."""
    objective, vocab = draft_objective(kind, frozen)
    head = objective.head
    export_head(tmp_path / "head", head, head.config, vocab.ids, "card")
    target = load_model(resolve_model(str(tiny_model_dir)), "float32", "cpu")
    monkeypatch.setattr("gpu_worker.training.commands.evaluate.is_held_out", lambda ids: True)
    prompts = ((3, 5, 9), (60, 5, 9))
    stored = [(*prompt, *range(first, first + 25)) for prompt, first in zip(prompts, (100, 150), strict=True)]
    greedy = []
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < 40 and ids[-1] != IM_END_ID:
            ids.append(int(prompt_logits(target, ids)[-1].argmax()))
        greedy.append(tuple(ids))
    found = {}
    for name, texts in (("stored", stored), ("greedy", greedy)):
        conversations = [Conversation(text, ((3, len(text)),), greedy=True) for text in texts]
        (tmp_path / name).mkdir()
        write_shard(shard_path(tmp_path / name, 0), conversations)
        evaluate(
            tmp_path / "head",
            model=str(tiny_model_dir),
            conversations=tmp_path / name,
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
        found[name] = json.loads((tmp_path / "head" / "evaluation.json").read_text())
    for facts in found.values():
        assert facts["conversations"] == 2
        assert facts["repeating"] == 0
        assert {row["texts"] for row in facts.values() if isinstance(row, dict)} == {2}
        assert len(facts["offline chain"]["acceptance"]) == 3
        chain, again = facts["served chain of 3"], facts["offline chain, texts as served"]
        assert chain["acceptance_length"] == pytest.approx(again["acceptance_length"], abs=0.2)
        assert facts["served tree of 6"]["acceptance_length"] >= 1.0
    # Only the texts as served are the target's own, whatever was stored.
    stored_row, greedy_row = (found[name]["offline chain"] for name in ("stored", "greedy"))
    differences = [abs(stored_row[of] - greedy_row[of]) for of in ("first_token_loss", "acceptance_length")]
    assert max(differences) > 0.01
    for facts in found.values():
        assert facts["offline chain, texts as served"] == found["greedy"]["offline chain"]
