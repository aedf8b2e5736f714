"""Random conversations and small training set-ups that several tests share."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from gpu_worker.models.heads.config import HeadKind
from gpu_worker.training.batches import DraftVocabulary
from gpu_worker.training.checkpoint import RunData
from gpu_worker.training.conversations import Conversation
from gpu_worker.training.dataset import FeatureDataset
from gpu_worker.training.features import feature_paths
from gpu_worker.training.fit import FitSettings, Trainer
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.new_head import HeadChoices, default_objective, head_config, new_head
from gpu_worker.training.objective import DraftObjective

DRAFT_VOCABULARY = 120


def random_conversations(count: int, seed: int) -> list[Conversation]:
    """Prompts of 4 to 9 tokens, answers of 3 to 20; every third goes on for a second answer."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        ids: list[int] = []
        answers = []
        for _ in range(2 if i % 3 == 0 else 1):
            ids += [rng.randrange(3, 300) for _ in range(rng.randint(4, 9))]
            start = len(ids)
            ids += [rng.randrange(3, 200) for _ in range(rng.randint(3, 20))]
            answers.append((start, len(ids)))
        made.append(Conversation(tuple(ids), tuple(answers), greedy=rng.random() < 0.5))
    return made


def draft_objective(
    kind: HeadKind,
    target: FrozenTarget,
    *,
    feature_layers: tuple[int, ...] = (0, 1),
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    vocabulary: int = DRAFT_VOCABULARY,
    loss: Any = "cross-entropy",
    **choices: Any,
) -> tuple[DraftObjective, DraftVocabulary]:
    """A new head with its loss; the draft vocabulary is the first `vocabulary` ids."""
    vocab = DraftVocabulary.of(torch.arange(vocabulary), target.config.vocab_size)
    config = head_config(
        HeadChoices(kind, draft_vocab_size=vocabulary, num_medusa_heads=3, **choices), target, feature_layers
    )
    head = new_head(config, target, vocab.ids, seed)
    objective = default_objective(kind, unroll=3, loss=loss)
    return DraftObjective(head, target.embedding, target.lm_head, vocab, objective, dtype), vocab


def trainer(
    kind: HeadKind,
    target: FrozenTarget,
    features: Path,
    output: Path,
    *,
    steps: int,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Trainer:
    """A run over all shards of `features`, with small batches; resumes if `output` holds a checkpoint."""
    paths = feature_paths(features)
    captured = kind is HeadKind.EAGLE3
    dataset = FeatureDataset(
        features, paths, hidden=not captured, captured=captured, held_out_thousandths=150
    )
    module, vocab = draft_objective(kind, target, dtype=dtype)
    data = RunData(tuple(path.name for path in paths), vocab.ids)
    every = {"log_every": 1, "validate_every": 4, "validation_steps": 3, "checkpoint_every": 3, "warmup": 2}
    return Trainer(
        module,
        dataset,
        data,
        FitSettings(steps=steps, rows_per_batch=48, **{**every, **settings}),
        output,
        {"kind": kind, "layers": (0, 1)},
    )
