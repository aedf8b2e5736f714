"""A head's configuration survives its file; whatever is wrong in the file is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_worker.errors import ModelError
from gpu_worker.layers.rotary import RopeConfig
from gpu_worker.models.heads.config import HeadConfig, HeadKind

CONFIG = HeadConfig(
    HeadKind.EAGLE3,
    hidden_size=64,
    vocab_size=300,
    draft_vocab_size=120,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    rope=RopeConfig(theta=5000.0, frequency_divisors=(1.0, 2.0)),
    feature_layers=(0, 1, 2),
    hit_rates=((0.5, 0.2), (0.3,)),
)


def written(**changes: Any) -> dict[str, Any]:
    """What a file with these fields changed holds."""
    return {**json.loads(json.dumps(CONFIG.to_json())), **changes}


def test_what_is_written_is_read() -> None:
    assert HeadConfig.from_json(written(), "config.json") == CONFIG


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": "x"}, r"config.json: .*rms_norm_eps"),
        ({"rope": {"theta": "x"}}, r"config.json: .*rope.theta"),
        ({"draft_vocab_size": "120"}, r"config.json: .*draft_vocab_size"),
        ({"feature_layers": [1, "2"]}, r"config.json: .*feature_layers"),
        ({"target_hidden": "norm"}, r"config.json: .*target_hidden"),
        ({"kind": "eagle4"}, r"config.json: .*kind"),
        ({"max_position_embeddings": -5}, "config.json: max_position_embeddings is -5, must be above 0"),
        ({"num_kv_heads": 0}, "config.json: num_kv_heads is 0, must be above 0"),
        ({"hit_rates": [[0.5], [0.9, 0.5]]}, r"config.json: hit_rates of depth 2 are \[0.9, 0.5\], must be"),
        ({"hit_rates": [[-0.1]]}, "config.json: hit_rates of depth 1"),
        ({"hit_rates": [[0.5], []]}, r"config.json: hit_rates of depth 2 are of 0 ranks, must be 1\.\.64"),
        ({"hit_rates": [[0.01] * 65]}, r"config.json: hit_rates of depth 1 are of 65 ranks, must be 1\.\.64"),
        ({"hidden_layers": 3}, "config.json: unknown field 'hidden_layers'"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        HeadConfig.from_json(written(**changes), "config.json")


def test_a_missing_field_is_named() -> None:
    fields = written()
    del fields["hidden_size"]
    with pytest.raises(ModelError, match=r"config.json: .*hidden_size"):
        HeadConfig.from_json(fields, "config.json")
