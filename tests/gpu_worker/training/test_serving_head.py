"""The training forward against the serving head beside its target, and acceptance measured with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.models.heads.build import build_head
from gpu_worker.models.heads.config import HeadKind
from gpu_worker.training.conversations import Conversation
from gpu_worker.training.extract import prefill_batch
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.objective import unrolled_logits
from gpu_worker.training.offline import OfflineEvaluator
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from tests.gpu_worker.forwarding import make_batch, prompt_logits
from tests.gpu_worker.training.samples import DRAFT_VOCABULARY, draft_objective

_STEPS = 4
_KINDS = [(HeadKind.EAGLE3, True), (HeadKind.MTP, True), (HeadKind.EAGLE, True), (HeadKind.EAGLE, False)]


@pytest.mark.parametrize(("kind", "full_norms"), _KINDS)
def test_training_and_serving_agree(
    kind: HeadKind, full_norms: bool, frozen: FrozenTarget, tiny_model_dir: Path
) -> None:
    objective, vocab = draft_objective(kind, frozen, full_norms=full_norms)
    config = objective.head.config
    objective.head.set_feature_sizes(0.5 + torch.rand(config.feature_size))
    target = load_model(resolve_model(str(tiny_model_dir)), "float32", "cpu")
    tensors = {**objective.head.tensors(), "draft_ids": vocab.ids}
    head = build_head(config, tensors, target)
    torch.manual_seed(5)
    ids = torch.randint(3, 100, (11,))
    features = torch.randn(11, config.feature_size)
    attention, pages = ReferenceAttention(), [4, 2, 0, 1, 3]
    with torch.no_grad():
        expected = unrolled_logits(objective, ids, features, _STEPS)
        for i in range(11 - _STEPS + 1):
            pool = head.new_pool(5, 4)
            shifted = torch.cat((torch.zeros(1, config.feature_size), features[:i]))
            batch = make_batch(ids[: i + 1].tolist(), 0, pages)
            rows = head.forward(batch, shifted, pool, attention, recycled=False).select(torch.tensor([i]))
            for k in range(_STEPS):
                torch.testing.assert_close(
                    head.output.logits(rows.normed)[0], expected[k, i], rtol=1e-4, atol=1e-4
                )
                if k + 1 < _STEPS:
                    batch = make_batch(ids[i + k + 1 : i + k + 2].tolist(), i + k + 1, pages)
                    rows = head.forward(batch, rows.recycled, pool, attention, recycled=True)


def _greedy_conversation(target: object, prompt: list[int], count: int) -> Conversation:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(prompt_logits(target, ids)[-1].argmax()))  # type: ignore[arg-type]
    return Conversation(tuple(ids), ((len(prompt), len(ids)),), greedy=True)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (HeadKind.EAGLE3, {}),
        (HeadKind.EAGLE3, {"attends_first_slot": False}),
        (HeadKind.EAGLE, {"target_hidden": "residual", "attends_first_slot": False}),
    ],
)
def test_offline_acceptance_is_that_of_drafting_one_chain_at_a_time(
    frozen: FrozenTarget, tiny_model_dir: Path, kind: HeadKind, changes: dict[str, Any]
) -> None:
    objective, vocab = draft_objective(kind, frozen, vocabulary=DRAFT_VOCABULARY)
    config = dataclasses.replace(objective.head.config, **changes)
    target = load_model(resolve_model(str(tiny_model_dir)), "float32", "cpu")
    head = build_head(config, {**objective.head.tensors(), "draft_ids": vocab.ids}, target)
    attention = ReferenceAttention()
    conversation = _greedy_conversation(target, [5, 9, 30, 44, 60], 40)
    evaluator = OfflineEvaluator(target, head, attention, depth=3)
    seen: list[torch.Tensor] = []
    evaluator._count = lambda _, starts, drafts, tally: seen.extend((starts, drafts))  # type: ignore[method-assign]
    evaluator.measure([conversation])
    starts, drafts = seen
    ids = list(conversation.token_ids)
    batch = prefill_batch([ids], 16, "cpu")
    layers = config.hidden_layers(target.num_layers)
    _, features = target.forward_capturing(batch, target.new_pool(3, 16), attention, layers)
    first = 0 if config.attends_first_slot else 1  # the first pair that is stored
    pages = list(range(12))

    def shifted_on(batch: ForwardBatch) -> ForwardBatch:
        return dataclasses.replace(batch, positions=batch.positions + first)

    for row, start in enumerate(starts.tolist()):
        pool = head.new_pool(12, 4)
        pairs = torch.cat((torch.zeros(1, config.feature_size), features[:start]))[first:]
        whole = shifted_on(make_batch(ids[first : start + 1], 0, pages))
        rows = head.forward(whole, pairs, pool, attention, recycled=False)
        rows = rows.select(torch.tensor([start - first]))
        chain = []
        for k in range(3):
            chain.append(int(vocab.ids[head.output.argmax(rows.normed)]))
            batch_k = shifted_on(make_batch([chain[-1]], start + k + 1 - first, pages))
            rows = head.forward(batch_k, rows.recycled, pool, attention, recycled=True)
        assert drafts[row].tolist() == chain


def test_acceptance_counts_prefixes_and_walks_like_a_server(
    frozen: FrozenTarget, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, vocab = draft_objective(HeadKind.MTP, frozen)
    target = load_model(resolve_model(str(tiny_model_dir)), "float32", "cpu")
    head = build_head(objective.head.config, {**objective.head.tensors(), "draft_ids": vocab.ids}, target)
    conversation = Conversation((5, 6, 7, 10, 11, 12, 13, 14, 15), ((3, 9),), greedy=True)
    evaluator = OfflineEvaluator(target, head, ReferenceAttention(), depth=2)
    # starts 3 .. 7 (tokens 10 .. 14): both right, first right, none, second alone right, first right
    drafted = torch.tensor([[11, 12], [12, 9], [9, 9], [9, 15], [15, 9]])
    monkeypatch.setattr(evaluator, "_chains", lambda *_: (drafted, torch.zeros(5, 64)))
    sampled = Conversation((5, 6, 7), ((1, 3),), greedy=False)
    found = evaluator.measure([conversation, sampled])
    assert found.starts == 5
    assert found.acceptance == [pytest.approx(3 / 5), pytest.approx(1 / 5)]
    # from 10: 11, 12 and the target's 13; from 13: the target's 14; from 14: 15, the last
    assert found.acceptance_length == pytest.approx(5 / 3)
    assert np.isfinite(found.first_token_loss)
