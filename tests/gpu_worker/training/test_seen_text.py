"""Held-out conversations that repeat what training learns are not measured."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from gpu_worker.training.conversations import Conversation, shard_path, write_shard
from gpu_worker.training.dataset import FeatureDataset, is_held_out
from gpu_worker.training.extract import Extractor
from gpu_worker.training.features import feature_paths
from gpu_worker.training.seen_text import RUN_TOKENS, SeenText


def text(*tokens: int, prompt: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, of which all but the first `prompt` are learnt."""
    ids = np.array(tokens, dtype=np.int32)
    return ids, (np.arange(len(ids)) >= prompt).astype(np.uint8)


def test_share_counts_the_runs_that_training_learns() -> None:
    seen = SeenText([text(*range(100)), text(*range(200, 230), prompt=10)])
    assert seen.share(*text(*range(50, 80))) == 1.0
    assert seen.share(*text(*range(50, 50 + RUN_TOKENS), *range(500, 500 + 2 * RUN_TOKENS))) == pytest.approx(
        1 / (2 * RUN_TOKENS + 1)
    )
    assert seen.share(*text(*range(200, 216))) == 0.0  # stood in a prompt there
    assert seen.share(*text(*range(212, 230))) == 1.0
    assert seen.share(*text(*range(50, 80), prompt=25)) == 0.0  # repeated by the prompt alone
    assert seen.share(*text(*range(50, 65))) == 0.0  # shorter than a run
    assert seen.share(*text(*reversed(range(50, 80)))) == 0.0


def test_runs_do_not_reach_across_conversations() -> None:
    seen = SeenText([text(*range(8)), text(*range(8, 16))])
    assert seen.share(*text(*range(16))) == 0.0


def test_what_training_says_is_not_measured(extractor: Extractor, tmp_path: Path) -> None:
    """The same answers behind other prompts: those whose first say is held out vanish, the new ones stay."""
    rng = random.Random(5)
    said = [rng.randrange(3, 200) for _ in range(40)]
    made: dict[bool, list[Conversation]] = {True: [], False: []}  # by whether the answer is the known one
    while min(len(conversations) for conversations in made.values()) < 60:
        known = rng.random() < 0.5
        prompt = [rng.randrange(3, 200) for _ in range(6)]
        answer = said if known else [rng.randrange(3, 200) for _ in range(40)]
        made[known].append(Conversation((*prompt, *answer), ((6, 46),), greedy=True))
    (tmp_path / "conversations").mkdir()
    write_shard(shard_path(tmp_path / "conversations", 0), [*made[True], *made[False]])
    features = tmp_path / "features"
    extractor.write(tmp_path / "conversations", features)
    dataset = FeatureDataset(
        features, feature_paths(features), hidden=True, captured=False, held_out_thousandths=200
    )
    held = {known: sum(is_held_out(c.token_array, 200) for c in of) for known, of in made.items()}
    assert min(held.values()) > 3
    assert (len(dataset.held_out), dataset.num_repeating) == (held[False], held[True])
    assert len(dataset.training) == len(made[True]) + len(made[False]) - sum(held.values())
