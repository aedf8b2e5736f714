"""The native decoder against a float64 reference with the same quantisation, and against the torch float32 model."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.errors import ModelError
from gpu_worker.forward_batch import ForwardBatch
from gpu_worker.kernels.native import KernelError, NativeKernels, ThreadTeam
from gpu_worker.kv_pool import KVPool
from gpu_worker.models.native import NativeCausalLM, build_native
from gpu_worker.models.registry import build_model
from gpu_worker.weights.gguf_checkpoint import GGUFCheckpoint
from gpu_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.gpu_worker.kernels import reference
from tests.gpu_worker.kernels.conftest import BuildModel, installed
from tests.gpu_worker.kernels.schedules import Rows, Sequence, make_batch, run

SHAPES = {
    "llama": {},
    "wide heads": {"head_dim": 128, "num_heads": 2, "num_kv_heads": 1},
    "heads of 80": {"head_dim": 80, "num_heads": 3, "num_kv_heads": 3},
    "heads of 96": {"head_dim": 96, "num_heads": 2, "num_kv_heads": 2, "num_layers": 1},
    "many heads for one": {"num_heads": 14, "num_kv_heads": 2, "head_dim": 16},
    "odd sizes": {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24, "vocab_size": 305},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "tie": False},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 32},
    "llama3 rope": {
        "rope": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, n).tolist()


def native_hidden(model: NativeCausalLM, ids: list[int], cuts: tuple[int, ...] = ()) -> torch.Tensor:
    sequence = Sequence(ids, list(range(-(-len(ids) // 16)))[::-1])
    pool = model.new_pool(len(sequence.pages), 16)
    bounds = [0, *cuts, len(ids)]
    return torch.cat([run(model, pool, [Rows(sequence, b - a)])[0] for a, b in pairwise(bounds)])


def torch_hidden(path: Path, ids: list[int]) -> torch.Tensor:
    checkpoint = GGUFCheckpoint(path) if path.is_file() else SafetensorsCheckpoint(path)
    config = checkpoint.config
    model = build_model(config, checkpoint, "float32", torch.device("cpu"))
    sequence = Sequence(ids, list(range(-(-len(ids) // 16))))
    pool = KVPool(
        model.num_layers, len(sequence.pages), 16, config.num_kv_heads, config.head_dim, torch.float32, "cpu"
    )
    return model.forward(make_batch([Rows(sequence, len(ids))], 16), pool, ReferenceAttention())


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("format", ["q4_0", "q4_1", "q8_0", "w8", "float_q8_0", "bf16"])
def test_equals_the_reference_with_the_same_quantisation(build: BuildModel, format: str) -> None:
    """Float32 sums round differently, so a value may now and then be quantised to the other side; through attention
    that reaches later rows. Hence the median, and one layer for the close comparison."""
    model, ids = build(format), tokens(150)
    for layers, middle, most in ((1, 1e-4, 0.02), (2, 0.01, 0.05)):
        short = model.truncated(layers)
        expected = torch.from_numpy(reference.hidden_states(short, ids)).float()
        errors = (native_hidden(short, ids) - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.median() < middle
        assert errors.max() < most


@pytest.mark.parametrize("name", list(SHAPES))
def test_close_to_the_float32_model(build: BuildModel, model_files: object, name: str) -> None:
    model, ids = build("float_q8_0", **SHAPES[name]), tokens(70)
    expected = torch_hidden(model_files(**SHAPES[name]), ids)  # type: ignore[operator]
    actual = native_hidden(model, ids, cuts=(40, 41))
    assert torch.cosine_similarity(actual, expected).min() > 0.97
    assert relative_error(actual, expected) < 0.1


def test_bfloat16_is_closer_than_integers(build: BuildModel, model_files: object) -> None:
    ids = tokens(60)
    expected = torch_hidden(model_files(), ids)  # type: ignore[operator]
    errors = [
        relative_error(native_hidden(build(format), ids), expected) for format in ("bf16", "float_q8_0", "w8")
    ]
    assert errors == sorted(errors)
    assert errors[-1] < 0.12


def test_embedded_model(embedded_model: Path) -> None:
    """The greedy continuation of a prompt follows the float32 model; every weight is that of the file."""
    checkpoint = GGUFCheckpoint(embedded_model)
    kernels = installed()
    model = build_native(checkpoint.config, checkpoint, "int8", kernels, ThreadTeam(kernels, 2))
    name, shape = "model.layers.3.self_attn.q_proj.weight", (576, 576)
    assert torch.equal(model._layers[3].qkv.dequantise(range(576)), checkpoint.read(name, shape))
    ids = [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        2,
        198,
        1,
        4093,
        198,
        1780,
        314,
        260,
        3575,
        282,
        4649,
        47,
    ]
    expected = torch_hidden(embedded_model, ids)
    hidden = native_hidden(model, ids)
    assert torch.cosine_similarity(hidden, expected).min() > 0.997
    logits = model.compute_logits(hidden)
    assert logits.shape == (len(ids), 49152)
    assert torch.equal(model.compute_argmax(hidden), logits.argmax(1))


def test_truncated_models_share_weights(build: BuildModel) -> None:
    model, ids = build("q4_1", num_layers=3), tokens(20)
    short = model.truncated(1)
    expected = torch.from_numpy(reference.hidden_states(short, ids)).float()
    assert short.num_layers == short.config.num_layers == 1
    assert relative_error(native_hidden(short, ids), expected) < 0.01
    with pytest.raises(ModelError, match="4 layers, must be between 1 and 3"):
        model.truncated(4)


def test_untied_head_and_padded_vocabulary(build: BuildModel, model_files: object) -> None:
    model = build("float_q8_0", tie=False)
    path = model_files(tie=False)  # type: ignore[operator]
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weight = SafetensorsCheckpoint(path).read("lm_head.weight", (320, 64))
    logits = model.compute_logits(hidden)
    assert logits.shape == (5, 300)
    assert relative_error(logits, hidden @ weight[:300].T) < 0.02


class BiasedCheckpoint:
    """A checkpoint in which every projection has a bias."""

    def __init__(self, checkpoint: SafetensorsCheckpoint) -> None:
        self._checkpoint = checkpoint

    def has(self, name: str) -> bool:
        return name.endswith(".bias") or self._checkpoint.has(name)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if not name.endswith(".bias"):
            return self._checkpoint.read(name, shape)
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def test_biases_of_every_projection(kernels: NativeKernels, teams: object, model_files: object) -> None:
    checkpoint = SafetensorsCheckpoint(model_files(intermediate_size=160))  # type: ignore[operator]
    tensors = BiasedCheckpoint(checkpoint)
    config = dataclasses.replace(checkpoint.config, qkv_bias=True, output_bias=True, mlp_bias=True)
    model = build_native(config, tensors, "bfloat16", kernels, teams(2))  # type: ignore[operator]
    ids = tokens(30)
    pool = KVPool(model.num_layers, 2, 16, config.num_kv_heads, config.head_dim, torch.float32, "cpu")
    batch = make_batch([Rows(Sequence(ids, [0, 1]), 30)], 16)
    exact = build_model(config, tensors, "float32", torch.device("cpu")).forward(
        batch, pool, ReferenceAttention()
    )
    assert relative_error(native_hidden(model, ids), exact) < 0.03


def test_refuses_precisions_it_does_not_compute_in(build: BuildModel, model_files: object) -> None:
    model = build("q8_0")
    checkpoint = SafetensorsCheckpoint(model_files())  # type: ignore[operator]
    with pytest.raises(ModelError, match="precision: 'float32'"):
        build_native(checkpoint.config, checkpoint, "float32", installed(), model.team)


def changed(batch: ForwardBatch, **fields: object) -> ForwardBatch:
    attention = {name: fields.pop(name) for name in list(fields) if hasattr(batch.attention, name)}
    metadata = type(batch.attention)(**{**vars(batch.attention), **attention})  # type: ignore[arg-type]
    return type(batch)(**{**vars(batch), **fields, "attention": metadata})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": torch.tensor([1, 2, 300])}, "input_ids: 300 is not in 0..299"),
        ({"input_ids": torch.tensor([1, -2, 3])}, "input_ids: -2"),
        ({"positions": torch.tensor([0, 1, 512])}, "positions: 512 is not in 0..511"),
        ({"out_slots": torch.tensor([0, 1, 64])}, "out_slots: 64 of row 2"),
        ({"out_slots": torch.tensor([0, 1])}, r"out_slots: torch.int64 \[2\], expected torch.int64 \[3\]"),
        ({"page_indices": np.array([4], np.int32)}, "page_indices: 4 of request 0"),
        ({"kv_lens": np.array([17], np.int32)}, "1 pages of request 0 do not hold 17 keys"),
        ({"kv_lens": np.array([2], np.int32)}, "kv_lens: 2 of request 0 is below its rows, 3"),
        ({"kv_lens": np.array([3, 3], np.int32)}, r"page_indptr: \[2\], expected \[3\]|qo_indptr: \[2\]"),
        ({"page_size": 4}, "page_size: 4 in the batch, 16 in the pool"),
        ({"tree_masks": (torch.ones(3, 3, dtype=torch.bool),)}, "tree_ancestors: row 0 lists 1"),
        ({"tree_masks": (torch.ones(2, 2, dtype=torch.bool),)}, r"tree_masks\[0\]: \[2, 2\]"),
    ],
)
def test_bad_batches_are_refused_before_anything_runs(
    build: BuildModel, fields: dict[str, object], message: str
) -> None:
    model = build("q8_0")
    pool = model.new_pool(4, 16)
    batch = make_batch([Rows(Sequence([1, 2, 3], [0]), 3)], 16)
    with pytest.raises(KernelError, match=message):
        model.forward(changed(batch, **fields), pool)
    assert not any(part.any() for part in pool.read(0, torch.arange(64)))


def test_a_pool_of_another_shape_is_refused(build: BuildModel) -> None:
    pool = build("q8_0", head_dim=32).new_pool(4, 16)
    with pytest.raises(KernelError, match="pool: 2 layers of 2 heads of 32"):
        build("q8_0").forward(make_batch([Rows(Sequence([1], [0]), 1)], 16), pool)
