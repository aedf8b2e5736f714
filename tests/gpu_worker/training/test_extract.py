"""Features on disk: what the target computes, whole conversations, resumed per shard, refused without room."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.training.conversations import read_shard, shard_path, shard_paths, write_shard
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.extract import Extractor, prefill_batch
from gpu_worker.training.features import FeatureMeta, FeatureShard, feature_path, feature_paths, law_rows
from tests.gpu_worker.forwarding import prompt_logits
from tests.gpu_worker.training.samples import random_conversations


def test_features_are_what_the_target_computes(
    extractor: Extractor, conversations_dir: Path, features_dir: Path
) -> None:
    shard = FeatureShard(feature_paths(features_dir)[1])
    conversations = list(read_shard(shard_paths(conversations_dir)[1]))
    target = extractor._target
    assert shard.num_conversations == len(conversations)
    for index in (0, 1, len(conversations) - 1):
        ids = conversations[index].token_ids
        read = shard.read(index, hidden=True, captured=True)
        assert tuple(read.token_ids.tolist()) == ids
        batch = prefill_batch([ids], 4, "cpu")
        hidden, captured = target.forward_capturing(
            batch, target.new_pool(len(ids), 4), ReferenceAttention(), (0, 1)
        )
        torch.testing.assert_close(read.hidden.float(), hidden, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(read.captured.float(), captured, rtol=1e-2, atol=2e-2)
        law = prompt_logits(target, ids).softmax(-1)[read.rows]
        probs, best = law.topk(8)
        torch.testing.assert_close(read.top_probs, probs, rtol=2e-3, atol=1e-4)
        assert (read.top_ids[:, 0] == best[:, 0]).all()


def test_laws_are_kept_where_the_next_token_is_an_answer() -> None:
    mask = np.array([0, 0, 1, 1, 0, 0, 1], np.uint8)
    assert law_rows(mask).tolist() == [1, 2, 5]


def test_whole_shards_are_left_alone_and_missing_ones_written(
    extractor: Extractor, conversations_dir: Path, features_dir: Path, tmp_path: Path
) -> None:
    first, second = feature_paths(features_dir)
    extractor._meta.write(tmp_path)
    kept = feature_path(tmp_path, 0)
    os.link(first, kept)
    feature_path(tmp_path, 1).with_suffix(".partial").write_bytes(b"half")
    told = []
    extractor.write(conversations_dir, tmp_path, told.append)
    assert kept.stat().st_ino == first.stat().st_ino
    assert feature_path(tmp_path, 1).read_bytes() == second.read_bytes()
    assert told[-1].tokens == told[-1].total_tokens
    assert told[-1].num_shards == 1


def test_a_full_disk_is_refused_before_anything_is_written(
    extractor: Extractor, conversations_dir: Path, tmp_path: Path
) -> None:
    careful = Extractor(
        extractor._target, extractor._attention, extractor._meta, free_bytes=lambda path: 1_000_000
    )
    with pytest.raises(TrainingError, match="GB must stay free"):
        careful.write(conversations_dir, tmp_path)
    assert not list(tmp_path.glob("features-*"))


def test_a_prompt_that_came_before_is_left_out(extractor: Extractor, tmp_path: Path) -> None:
    conversations = random_conversations(4, seed=5)
    write_shard(shard_path(tmp_path / ".", 0), conversations)
    write_shard(shard_path(tmp_path, 1), [conversations[2], *random_conversations(1, seed=6)])
    extractor.write(tmp_path, tmp_path / "features")
    shard = FeatureShard(feature_path(tmp_path / "features", 1))
    assert shard.num_conversations == 1


def test_features_of_another_target_are_not_mixed(features_dir: Path, tmp_path: Path) -> None:
    meta = FeatureMeta.read(features_dir)
    meta.write(tmp_path)
    other = FeatureMeta(**{**vars(meta), "precision": "int8"})
    with pytest.raises(TrainingError, match="precision is 'float32', not 'int8'"):
        other.write(tmp_path)


def test_conversations_survive_the_disk(tmp_path: Path) -> None:
    conversations = random_conversations(7, seed=3)
    write_shard(shard_path(tmp_path, 0), conversations)
    assert list(read_shard(shard_path(tmp_path, 0))) == conversations
