"""Our forward pass gives transformers' logits, for every architecture and rotary scaling; truncation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_worker.attention.cpu import CPUAttention
from gpu_worker.errors import ModelError
from gpu_worker.models.base import CausalLM
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from tests.gpu_worker.forwarding import make_batch, make_pool, prompt_logits
from tests.models import make_tiny_llama

IDS = [1, 47, 200, 3, 3, 299, 150, 88, 9, 254, 17, 63, 120, 5, 77, 210, 31, 31, 186, 40]
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with every option": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn with attention factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.3,
    },
}


def load(directory: Path, dtype: str = "float32") -> CausalLM:
    return load_model(resolve_model(str(directory)), dtype, "cpu")


def transformers_logits(directory: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers(tmp_path: Path, architecture: str, tie: bool) -> None:
    directory = make_tiny_llama(tmp_path, architecture=architecture, tie=tie)
    expected = transformers_logits(directory, IDS)
    logits = prompt_logits(load(directory), IDS)
    assert logits.shape == (len(IDS), 300)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected[:, :300], rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", ["v4", "v5"])
@pytest.mark.parametrize("rope", ROPES)
def test_rotary_scalings_equal_transformers(tmp_path: Path, rope: str, layout: str) -> None:
    directory = make_tiny_llama(
        tmp_path, rope=ROPES[rope], rope_layout=layout, rope_theta=5000.0, head_dim=32, num_layers=1
    )
    ids = [(7 * i * i + 3 * i) % 300 for i in range(150)]  # far enough for slow frequencies to matter
    logits = prompt_logits(load(directory), ids, attention=CPUAttention())
    torch.testing.assert_close(logits, transformers_logits(directory, ids)[:, :300], rtol=0, atol=1e-4)


def test_scalings_differ_from_each_other(tmp_path: Path) -> None:
    """Guards the test above: a scaling that were ignored on both sides would pass it."""
    rows = []
    for name, rope in ROPES.items():
        directory = make_tiny_llama(tmp_path / name, rope=rope, head_dim=32, num_layers=1)
        rows.append(prompt_logits(load(directory), IDS)[-1])
    for i, row in enumerate(rows):
        assert all((row - other).abs().max() > 1e-3 for other in rows[:i])


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 16), (6, 1, 8), (4, 2, 32)])
def test_head_layouts_equal_transformers(
    tmp_path: Path, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    directory = make_tiny_llama(
        tmp_path, hidden_size=48, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    logits = prompt_logits(load(directory), IDS)
    torch.testing.assert_close(logits, transformers_logits(directory, IDS)[:, :300], rtol=0, atol=1e-4)


@pytest.mark.parametrize("cuts", [(1,), (5, 6, 7), tuple(range(1, len(IDS)))])
def test_chunks_equal_one_pass(tiny_model_dir: Path, cuts: tuple[int, ...]) -> None:
    model = load(tiny_model_dir)
    torch.testing.assert_close(prompt_logits(model, IDS, cuts), prompt_logits(model, IDS), rtol=0, atol=1e-4)


def test_rows_are_independent_of_their_order_in_the_batch(tiny_model_dir: Path) -> None:
    """A repeated pass over the same slots (a verify that is run again) gives the same rows."""
    model = load(tiny_model_dir)
    pool, backend = make_pool(model, 8), CPUAttention()
    batch = make_batch(IDS, 0, range(8))
    first = model.forward(batch, pool, backend)
    torch.testing.assert_close(model.forward(batch, pool, backend), first, rtol=0, atol=0)


def test_truncated_model_is_the_model_of_the_first_layers(tmp_path: Path) -> None:
    deep = load(make_tiny_llama(tmp_path / "deep", num_layers=3, seed=5))
    cut = deep.truncated(2)
    assert (cut.num_layers, cut.config.num_layers, deep.num_layers) == (2, 2, 3)

    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "deep", dtype=torch.float32)
    weights.model.layers = weights.model.layers[:2]
    with torch.inference_mode():
        expected = weights(torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(prompt_logits(cut, IDS), expected[:, :300], rtol=0, atol=1e-4)


@pytest.mark.parametrize("count", [0, 3, -1])
def test_truncation_outside_the_model_is_refused(tiny_model_dir: Path, count: int) -> None:
    with pytest.raises(ModelError, match=rf"{count} layers, must be between 1 and 2"):
        load(tiny_model_dir).truncated(count)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "least_cosine"), [("bfloat16", 0.998), ("int8", 0.99)])
def test_lower_precision_stays_close(
    tmp_path: Path, architecture: str, dtype: str, least_cosine: float
) -> None:
    directory = make_tiny_llama(tmp_path, architecture=architecture)
    exact = prompt_logits(load(directory), IDS)
    model = load(directory, dtype)
    logits = prompt_logits(model, IDS)
    assert logits.dtype == torch.float32
    assert torch.cosine_similarity(logits, exact, dim=-1).min() > least_cosine
    assert not torch.equal(logits, exact), "the precision asked for is not in use"


def test_dtype_of_hidden_states(tiny_model_dir: Path) -> None:
    assert load(tiny_model_dir, "bfloat16").dtype == torch.bfloat16
    assert load(tiny_model_dir, "int8").dtype == torch.float32
