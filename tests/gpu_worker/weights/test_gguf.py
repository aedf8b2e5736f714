"""GGUF files written by the gguf package equal the safetensors models they came from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.numpy import load_file, save_file

from gpu_worker.errors import ModelError
from gpu_worker.models.base import CausalLM
from gpu_worker.weights.gguf_file import GGUFFile
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from tests.gpu_worker.forwarding import prompt_logits
from tests.gpu_worker.gguf_models import write_gguf
from tests.models import make_tiny_llama

IDS = [1, 30, 77, 5, 260, 14, 99, 180, 2, 45]


def load(path: Path) -> CausalLM:
    return load_model(resolve_model(str(path)), "float32", "cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose query and key heads differ in number, so that permuting by the wrong one shows."""
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), num_heads=4, num_kv_heads=2)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_float_file_equals_safetensors(tmp_path: Path, architecture: str, tie: bool) -> None:
    directory = make_tiny_llama(tmp_path / "model", architecture=architecture, tie=tie, vocab_size=304)
    model = load(write_gguf(directory, tmp_path / "model.gguf", num_padding_tokens=4))
    assert model.config.architecture == architecture
    assert (model.config.vocab_size, model.config.num_embeddings) == (300, 304)
    expected = prompt_logits(load(directory), IDS)
    torch.testing.assert_close(prompt_logits(model, IDS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantised_file_equals_its_dequantised_weights(llama: Path, tmp_path: Path, kind: str) -> None:
    """Blocks lie within rows, so quantising commutes with the reordering of q and k rows."""
    quantisation = GGMLQuantizationType[kind]
    path = write_gguf(llama, tmp_path / "model.gguf", quantisation)
    rounded_dir = tmp_path / "rounded"
    shutil.copytree(llama, rounded_dir)
    tensors = load_file(llama / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = gguf.dequantize(gguf.quantize(tensor, quantisation), quantisation)
    save_file(tensors, rounded_dir / "model.safetensors")
    found = prompt_logits(load(path), IDS)
    torch.testing.assert_close(found, prompt_logits(load(rounded_dir), IDS), rtol=0, atol=1e-5)
    assert (found - prompt_logits(load(llama), IDS)).abs().max() > 1e-4, "nothing was quantised"


def test_k_quants_dequantise_as_the_package_does(tmp_path: Path) -> None:
    """The package cannot write K-quants: any bytes serve as blocks (small, so that scales are finite)."""
    generator = np.random.default_rng(0)
    path = tmp_path / "blocks.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    expected = {}
    for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        kind = GGMLQuantizationType[name]
        size = gguf.GGML_QUANT_SIZES[kind][1]
        raw = generator.integers(0, 60, (48, 2 * size), dtype=np.uint8)
        writer.add_tensor(name, raw, raw_dtype=kind)
        expected[name] = gguf.dequantize(raw, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    for name, values in expected.items():
        assert file.tensors[name].shape == (48, 512)
        np.testing.assert_array_equal(file.dequantized(name), values)


def test_header_reads_as_the_package_reads_it(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf", extra={"general.alignment": 64})
    file, reader = GGUFFile(path), GGUFReader(path)
    ours = dict(file.metadata)
    theirs = {key: f.contents() for key, f in reader.fields.items() if not key.startswith("GGUF.")}
    assert ours == theirs
    assert {t.name: (t.data_offset, t.n_bytes) for t in reader.tensors} == {
        name: (tensor.offset, tensor.num_bytes) for name, tensor in file.tensors.items()
    }


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rotary_scaling_in_metadata(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 16}
    directory = make_tiny_llama(tmp_path / "model", rope=rope, head_dim=32)
    found = prompt_logits(load(write_gguf(directory, tmp_path / "model.gguf")), IDS)
    torch.testing.assert_close(found, prompt_logits(load(directory), IDS), rtol=0, atol=1e-5)


def test_rotary_divisors_tensor(tmp_path: Path) -> None:
    """Llama 3's scaling comes as a tensor of divisors; equal divisors are linear scaling by their value."""
    directory = make_tiny_llama(tmp_path / "plain")
    linear = make_tiny_llama(tmp_path / "linear", rope={"rope_type": "linear", "factor": 2.0})
    path = write_gguf(directory, tmp_path / "model.gguf", rope_divisors=[2.0] * 8)
    torch.testing.assert_close(
        prompt_logits(load(path), IDS), prompt_logits(load(linear), IDS), rtol=0, atol=1e-5
    )


def test_end_of_text_ids(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf", extra={"tokenizer.ggml.eot_token_id": 0})
    assert load(path).config.eos_token_ids == (2, 0)


def test_directory_with_one_gguf_file(llama: Path, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf")
    assert load(tmp_path).config.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("part", [0.999, 0.5, 0.05, 0.002])
def test_file_cut_short_is_refused(llama: Path, tmp_path: Path, part: float) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(ModelError, match=r"model\.gguf: the file is cut short: (tensor \S+ ends at|its \d+)"):
        load(path)


def test_every_cut_of_the_header_is_refused(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf")
    content = path.read_bytes()
    for size in range(1, 3000, 53):
        path.write_bytes(content[:size])
        with pytest.raises(ModelError, match=r"model\.gguf: (the file is cut short|not a GGUF file)"):
            load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as a GGUF file"),
        (b"PK\x03\x04 a zip file", r"not a GGUF file: it starts with b'PK\\x03\\x04'"),
        (b"GGUF" + (9).to_bytes(4, "little") + bytes(64), "GGUF version 9, supported are 2 and 3"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(64), "GGUF version 50331648"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as raised:
        load(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"omit": "blk.1.ffn_up.weight"}, r"tensor blk\.1\.ffn_up\.weight \(model\.layers\.1\.mlp\.up_proj"),
        ({"omit": "token_embd.weight"}, r"tensor token_embd\.weight is missing"),
        (
            {"reshape": {"blk.0.attn_k.weight": (64, 32)}},
            r"blk\.0\.attn_k\.weight .* has shape \[64, 32\], expected \[32, 64\]",
        ),
        (
            {"extra": {"general.architecture": "mamba"}},
            "general.architecture is 'mamba'; known .* llama, qwen2",
        ),
        ({"extra": {"llama.expert_count": 8}}, "expert_count is 8"),
        (
            {"extra": {"llama.rope.dimension_count": 8}},
            r"rope\.dimension_count is 8, only the whole head \(16\)",
        ),
        ({"extra": {"llama.block_count": 0}}, "block_count is 0, expected a positive integer"),
        ({"extra": {"llama.block_count": 3}}, r"tensor blk\.2\.\S+ .* is missing"),
        ({"extra": {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}}, "'longrope'"),
    ],
)
def test_unusable_models_say_where_and_what(
    llama: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf", **options)
    with pytest.raises(ModelError, match=message) as raised:
        load(path)
    assert str(path) in str(raised.value)
