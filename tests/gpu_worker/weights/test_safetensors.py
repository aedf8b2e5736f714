"""Safetensors directories: one file, shards, tied heads; and each way in which one can be broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.errors import ModelError
from gpu_worker.models.base import CausalLM
from gpu_worker.models.heads.config import SECTION, HeadKind, decoder_head_config
from gpu_worker.weights.draft_checkpoint import load_draft_model
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from tests.gpu_worker.forwarding import prompt_logits
from tests.gpu_worker.weights.published_heads import write
from tests.models import make_tiny_llama

IDS = [1, 30, 77, 5, 260, 14]


def load(directory: Path) -> CausalLM:
    return load_model(resolve_model(str(directory)), "float32", "cpu")


def change_weights(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors of model.safetensors; None removes one. Names are written with __ for a dot."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("write_index", [True, False])
def test_shards_equal_one_file(tmp_path: Path, write_index: bool) -> None:
    whole = load(make_tiny_llama(tmp_path / "whole", tie=False))
    sharded = load(make_tiny_llama(tmp_path / "sharded", tie=False, sharded=True, write_index=write_index))
    assert torch.equal(prompt_logits(whole, IDS), prompt_logits(sharded, IDS))


def test_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    model = load(make_tiny_llama(tmp_path))
    assert model.lm_head.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert model.lm_head.weight.shape == (300, 64)
    assert model.embedding.weight.shape == (320, 64)


def test_head_shipped_though_tied_is_the_embedding(tmp_path: Path) -> None:
    plain = load(make_tiny_llama(tmp_path / "plain"))
    directory = make_tiny_llama(tmp_path / "shipped", ship_tied_head=True)
    assert "lm_head.weight" in load_file(directory / "model.safetensors")
    assert torch.equal(prompt_logits(load(directory), IDS), prompt_logits(plain, IDS))


def test_half_precision_file_loads_as_float32(tmp_path: Path) -> None:
    model = load(make_tiny_llama(tmp_path, dtype="bfloat16"))
    assert model.dtype == torch.float32
    assert prompt_logits(model, IDS).isfinite().all()


def test_vocabulary_without_tokenizer_is_the_head(tmp_path: Path) -> None:
    assert load(make_tiny_llama(tmp_path, tokenizer_vocab_size=None)).config.vocab_size == 320


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path)
    change_weights(directory, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is in none of"):
        load(directory)


def test_untied_model_without_head_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path, tie=False)
    change_weights(directory, lm_head__weight=None)
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight is in none of the weight files"):
        load(directory)


def test_wrong_shape_names_tensor_and_both_shapes(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path)
    change_weights(directory, model__layers__0__self_attn__k_proj__weight=torch.zeros(16, 64))
    message = r"k_proj\.weight has shape \[16, 64\], expected \[32, 64\]"
    with pytest.raises(ModelError, match=message):
        load(directory)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path)
    change_weights(directory, model__norm__weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has type torch\.int8"):
        load(directory)


def test_missing_shard_is_named_with_and_without_index(tmp_path: Path) -> None:
    for write_index in (True, False):
        directory = make_tiny_llama(tmp_path / str(write_index), sharded=True, write_index=write_index)
        (directory / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: .* is missing"):
            load(directory)


def test_weights_cut_short_are_refused(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read as safetensors"):
        load(directory)


def test_directory_without_weights_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path)
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ModelError, match="no safetensors file"):
        load(directory)


@pytest.mark.parametrize("content", ["{", "[1]", "\udcff"])
def test_config_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    directory = make_tiny_llama(tmp_path)
    (directory / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json: (cannot be read as JSON|holds a list, expected)"):
        load(directory)


def test_a_drafting_head_is_no_model(tmp_path: Path) -> None:
    target = load(make_tiny_llama(tmp_path / "target"))
    config = {SECTION: decoder_head_config(HeadKind.EAGLE3, target.config).to_json()}
    directory = write(tmp_path / "head", config, {"fuse.weight": torch.zeros(2)})
    match = r"head/config\.json: this is a drafting head, not a model; it is given with --head"
    with pytest.raises(ModelError, match=match):
        load(directory)
    cpu = torch.device("cpu")
    with pytest.raises(ModelError, match=match):
        load_draft_model(str(directory), target, tmp_path / "target", "float32", cpu, None)


def test_empty_index_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_llama(tmp_path, sharded=True)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ModelError, match="weight_map is missing or empty"):
        load(directory)
