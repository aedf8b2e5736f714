"""A tiny target, conversations that are random ids, and what extract makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_worker.attention.cpu import CPUAttention
from gpu_worker.training.conversations import Conversation, shard_path, write_shard
from gpu_worker.training.extract import Extractor
from gpu_worker.training.features import FeatureMeta
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from tests.gpu_worker.training.samples import random_conversations


@pytest.fixture(scope="session")
def conversations_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of conversations of several lengths, some with two answers."""
    directory = tmp_path_factory.mktemp("conversations")
    for index in range(2):
        write_shard(shard_path(directory, index), random_conversations(24, seed=index))
    return directory


@pytest.fixture(scope="session")
def extractor(tiny_model_dir: Path) -> Extractor:
    """Over the tiny target in float32, layers 0 and 1, eight ids of each law."""
    source = resolve_model(str(tiny_model_dir))
    target = load_model(source, "float32", "cpu")
    meta = FeatureMeta(
        target=str(tiny_model_dir),
        revision=source.revision,
        precision="float32",
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        feature_layers=(0, 1),
        top_k=8,
    )
    return Extractor(target, CPUAttention(torch.device("cpu")), meta, rows_per_pass=100)


@pytest.fixture(scope="session")
def features_dir(
    extractor: Extractor, conversations_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What the extractor made of the conversations. Read only."""
    directory = tmp_path_factory.mktemp("features")
    extractor.write(conversations_dir, directory)
    return directory


@pytest.fixture(scope="session")
def frozen(tiny_model_dir: Path) -> FrozenTarget:
    """The tiny target's tables."""
    return FrozenTarget.load(resolve_model(str(tiny_model_dir)), 300)


@pytest.fixture
def one_conversation() -> Conversation:
    """A prompt of five tokens and an answer of four."""
    return Conversation(tuple(range(40, 49)), ((5, 9),), greedy=True)
