"""Features on disk: what the target computes, whole conversations, resumed per shard, refused without room."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.errors import ModelError
from gpu_worker.training.conversations import read_shard, shard_path, shard_paths, write_shard
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.extract import Extractor, prefill_batch
from gpu_worker.training.features import FeatureMeta, FeatureShard, feature_path, feature_paths, law_rows
from gpu_worker.training.whole_file import whole_file
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


def test_conversations_that_changed_are_extracted_anew(extractor: Extractor, tmp_path: Path) -> None:
    first, second = random_conversations(3, seed=5), random_conversations(2, seed=6)
    features = tmp_path / "features"
    write_shard(shard_path(tmp_path, 0), first)
    write_shard(shard_path(tmp_path, 1), second)
    begun: list[tuple[int, int]] = []
    extractor.write(tmp_path, features, begin=lambda *facts: begun.append(facts))
    every = [*first, *second]
    assert begun == [(sum(len(one.token_ids) for one in every), extractor.bytes_needed(every))]
    assert feature_path(features, 0).stat().st_mode & 0o777 == 0o644
    kept = feature_path(features, 0).stat().st_ino
    assert extractor.write(tmp_path, features) == 0
    others = random_conversations(1, seed=7)
    write_shard(shard_path(tmp_path, 1), others)
    assert extractor.write(tmp_path, features) == len(others[0].token_ids)
    assert FeatureShard(feature_path(features, 1)).token_ids.tolist() == list(others[0].token_ids)
    assert feature_path(features, 0).stat().st_ino == kept


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ('{"token_ids":[1,2,3],"answers":[[1,9]],"greedy":true}', r"answers has \[1, 9\].* within 3 tokens"),
        ('{"token_ids":[1,2,3],"answers":[[2,2]],"greedy":true}', r"answers has \[2, 2\]"),
        (
            '{"token_ids":[1,2,3],"answers":[[1,3],[2,3]],"greedy":true}',
            r"answers has \[2, 3\], must begin at 3",
        ),
        ('{"token_ids":[1,-2,3],"answers":[[1,3]],"greedy":true}', r"token_ids has -2, not in 0\.\."),
        ('{"token_ids":[1,99999,3],"answers":[[1,3]],"greedy":true}', r"token_ids has 99999, not in 0\.\."),
    ],
)
def test_a_conversation_that_cannot_be_is_named(
    conversation: str, message: str, extractor: Extractor, tmp_path: Path
) -> None:
    good = '{"token_ids":[1,2,3],"answers":[[1,3]],"greedy":true}'
    shard_path(tmp_path, 0).write_text(f"{good}\n{conversation}\n", encoding="utf-8")
    with pytest.raises(ModelError, match=f"conversations-00000.jsonl:2: {message}"):
        extractor.write(tmp_path, tmp_path / "features")
    assert not (tmp_path / "features").exists()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("", encoding="utf-8")
    with (
        pytest.raises(TrainingError, match="taken: cannot be written: "),
        whole_file(tmp_path / "taken") as part,
    ):
        part.write_text("half", encoding="utf-8")

    def fill(path: Path) -> None:
        with whole_file(path) as part:
            part.write_text("half", encoding="utf-8")
            raise RuntimeError("no room\nand where in the library")

    with pytest.raises(TrainingError, match=r"full: cannot be written: no room$"):
        fill(tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]
