"""Draft heads that cannot be loaded: the message names file, tensor or field, what was found and the limit."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_worker.errors import ModelError
from gpu_worker.models.heads.config import SECTION, HeadKind, decoder_head_config
from gpu_worker.models.heads.tensors import tensor_shapes
from gpu_worker.weights.head_checkpoint import load_head
from tests.gpu_worker.weights import published_heads as heads
from tests.gpu_worker.weights.published_heads import LAYERS, TARGET, H, Json, Tensors, write

Layout = Callable[[], tuple[Json, Tensors]]
LAYOUTS: list[Layout] = [
    heads.eagle,
    heads.eagle3,
    heads.speculators_eagle3,
    heads.speculators_eagle,
    heads.deepseek_mtp,
    heads.qwen_mtp,
    heads.mimo_mtp,
    lambda: ({}, heads.medusa()),
    lambda: ({}, heads.medusa_vllm()),
]
# tensors that may be absent: copies of the target's, optional biases, what marks an optional feature
OPTIONAL = ("embed_tokens.weight", "bias", "shared_head.head.weight", "t2d")


def refused(tmp_path: Path, config: Json, tensors: Tensors, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        load_head(str(write(tmp_path, config, tensors)), TARGET)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_missing_tensor_is_an_error(tmp_path: Path, layout: Layout) -> None:
    config, tensors = layout()
    loaded = load_head(str(write(tmp_path / "whole", config, tensors)), TARGET)
    missing = 0
    for i, name in enumerate(sorted(tensors)):
        if any(part in name for part in OPTIONAL) or name in ("model.norm.weight",):
            continue
        if name.startswith("model.layers.0.") or (
            name == "lm_head.weight" and "model.embed_tokens.weight" in tensors
        ):
            continue  # the target's own
        without = {other: tensor for other, tensor in tensors.items() if other != name}
        with pytest.raises(ModelError, match=re.escape(name)):
            load_head(str(write(tmp_path / str(i), config, without)), TARGET)
        missing += 1
    assert missing >= min(len(loaded.tensors), 6)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    config, tensors = heads.eagle3()
    del tensors["midlayer.mlp.up_proj.weight"]
    refused(
        tmp_path, config, tensors, r"tensor midlayer\.mlp\.up_proj\.weight is in none of the weight files"
    )


def test_wrong_hidden_size(tmp_path: Path) -> None:
    config, tensors = heads.eagle(hidden_size=64)
    refused(tmp_path, config, tensors, r"config\.json: hidden_size is 64, the target's hidden_size is 32")


def test_wrong_hidden_size_without_a_config(tmp_path: Path) -> None:
    tensors = {name: t[:, : H - 8] if t.ndim == 2 else t for name, t in heads.medusa().items()}
    match = r"tensor 0\.1\.weight has shape \[96, 24\], expected \[96, 32\]"
    refused(tmp_path, {}, {name: t.contiguous() for name, t in tensors.items()}, match)


def test_wrong_target_hidden_size(tmp_path: Path) -> None:
    refused(tmp_path, *heads.speculators_eagle3(target_hidden_size=64), "target_hidden_size is 64")


def test_wrong_vocabulary(tmp_path: Path) -> None:
    refused(tmp_path, *heads.eagle3(vocab_size=128), r"vocab_size is 128, the target's is 90")


def test_wrong_vocabulary_of_medusa(tmp_path: Path) -> None:
    tensors = heads.medusa()
    tensors["1.1.weight"] = torch.zeros(100, H)
    refused(tmp_path, {}, tensors, r"tensor 1\.1\.weight has shape \[100, 32\], expected \[90, 32\]")


def test_embedding_of_another_vocabulary(tmp_path: Path) -> None:
    config, tensors = heads.eagle()
    tensors["embed_tokens.weight"] = torch.zeros(100, H)
    refused(tmp_path, config, tensors, r"tensor embed_tokens\.weight has shape \[100, 32\]")


def test_bias_that_the_config_promises(tmp_path: Path) -> None:
    config, tensors = heads.eagle(bias=True)
    del tensors["fc.bias"]
    refused(tmp_path, config, tensors, r"tensor fc\.bias is in none")


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("input_norm.weight", "norm in front of fc"),
        ("fc_norm.0.weight", r"norms in front of fc \(fc_norm\)"),
        ("midlayer.self_attn.q_norm.weight", "norms of queries and keys"),
        ("midlayer.self_attn.o_proj.bias", "no place in this layout"),
        ("fc.bias", "no place in this layout"),
    ],
)
def test_tensors_that_cannot_be_computed(tmp_path: Path, extra: str, reason: str) -> None:
    config, tensors = heads.eagle3()
    tensors[extra] = torch.ones(H)
    refused(tmp_path, config, tensors, rf"tensor {extra} cannot be used: .*{reason}")


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm"])
def test_flags_that_cannot_be_computed(tmp_path: Path, flag: str) -> None:
    refused(tmp_path, *heads.speculators_eagle3(**{flag: True}), rf"config\.json: {flag} is true")


def test_other_refusals_of_speculators(tmp_path: Path) -> None:
    refused(
        tmp_path / "a", *heads.speculators_eagle3(speculators_model_type="dflash"), "is 'dflash', supported"
    )
    refused(tmp_path / "b", *heads.speculators_eagle(layernorms=True), "layernorms is true")
    refused(tmp_path / "c", *heads.speculators_eagle3(transformer_layer_config=None), "expected an object")


@pytest.mark.parametrize("ids", [[0, 2, 3], [2, 3, LAYERS + 1], ["2"], []])
def test_layer_ids_out_of_range(tmp_path: Path, ids: list[object]) -> None:
    config, tensors = heads.eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    refused(tmp_path, config, tensors, "eagle_aux_hidden_state_layer_ids")


def test_number_of_fused_layers_must_fit_fc(tmp_path: Path) -> None:
    config, tensors = heads.eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]})
    refused(tmp_path, config, tensors, r"tensor fc\.weight has shape \[32, 96\], expected \[32, 128\]")


def test_draft_vocabulary_faults(tmp_path: Path) -> None:
    config, tensors = heads.eagle3()
    refused(
        tmp_path / "a", config | {"draft_vocab_size": 41}, tensors, "d2t has 40 ids, draft_vocab_size is 41"
    )
    refused(tmp_path / "b", config, tensors | {"d2t": tensors["d2t"] + 50}, r"within \[50, 128\], .* 0\.\.95")
    repeated = tensors["d2t"].clone()
    repeated[1] = 3  # draft ids 1 and 2 both mean 4
    refused(tmp_path / "c", config, tensors | {"d2t": repeated}, "the same target id to several")
    marks = tensors["t2d"].clone()
    marks[0], marks[1] = False, True
    refused(tmp_path / "d", config, tensors | {"t2d": marks}, "t2d marks 40 ids, which are not the 40")
    refused(tmp_path / "e", config, tensors | {"t2d": marks[:50]}, "t2d has 50 ids, the target has 90")
    refused(tmp_path / "f", config, tensors | {"d2t": torch.ones(40)}, "d2t has type torch.float32")
    without = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    refused(
        tmp_path / "g", config, without, "tensor d2t is in none of the weight files, draft_vocab_size is 40"
    )


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("self_attn.kv_a_proj_with_mqa.weight", "multi-head latent attention"),
        ("mlp.experts.0.gate_proj.weight", "mixtures of experts"),
    ],
)
def test_mtp_layers_that_are_not_plain(tmp_path: Path, extra: str, reason: str) -> None:
    config, tensors = heads.deepseek_mtp()
    tensors[f"model.layers.{LAYERS}.{extra}"] = torch.zeros(4, H)
    refused(tmp_path, config, tensors, rf"{extra} cannot be used: {reason}")


def test_mtp_embedding_of_its_own(tmp_path: Path) -> None:
    config, tensors = heads.deepseek_mtp()
    tensors[f"model.layers.{LAYERS}.embed_tokens.weight"] += 1
    refused(tmp_path, config, tensors, r"embed_tokens\.weight differs from model\.embed_tokens\.weight")


def test_partial_rotary_embedding_and_quantised_heads(tmp_path: Path) -> None:
    refused(tmp_path / "a", *heads.deepseek_mtp(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5")
    refused(tmp_path / "b", *heads.eagle3(quantization_config={"quant_method": "fp8"}), "'fp8'")


def test_own_layout_faults(tmp_path: Path) -> None:
    config = dataclasses.replace(
        decoder_head_config(HeadKind.EAGLE3, TARGET, draft_vocab_size=3), own_lm_head=True
    )
    tensors = heads.random(1, **tensor_shapes(config)) | {"draft_ids": torch.tensor([1, 2, 3])}
    section = {SECTION: config.to_json()}
    refused(tmp_path / "a", section, tensors | {"draft_ids": torch.tensor([1, 2, 90])}, r"ids in 0\.\.89")
    refused(
        tmp_path / "b", section, tensors | {"draft_ids": torch.tensor([1, 2])}, r"shape \[2\], expected \[3\]"
    )
    wider = {SECTION: dataclasses.replace(config, hidden_size=64).to_json()}
    refused(tmp_path / "c", wider, tensors, "hidden_size is 64, the target's is 32")
    refused(tmp_path / "d", {SECTION: config.to_json() | {"mystery": 1}}, tensors, "unknown field 'mystery'")
    refused(tmp_path / "e", {SECTION: []}, tensors, "expected an object")
    refused(tmp_path / "f", section, tensors | {"extra": torch.zeros(1)}, "tensor extra cannot be used")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_weights_that_are_not_finite(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    config = decoder_head_config(HeadKind.EAGLE3, TARGET)
    tensors = {name: tensor.to(dtype) for name, tensor in heads.random(1, **tensor_shapes(config)).items()}
    section = {SECTION: config.to_json()}
    loaded = load_head(str(write(tmp_path / "whole", section, tensors)), TARGET)
    assert loaded.tensors.keys() == tensors.keys()
    for name in ("fuse.weight", "layers.0.mlp.down_proj.weight", "norm.weight"):
        spoiled = tensors[name].to(torch.float32, copy=True)
        spoiled.flatten()[-1] = value
        match = rf"model\.safetensors: tensor {re.escape(name)} holds values that are not finite"
        refused(tmp_path / name, section, tensors | {name: spoiled.to(dtype)}, match)


def test_published_and_pickled_weights_that_are_not_finite(tmp_path: Path) -> None:
    config, tensors = heads.eagle()
    tensors["fc.weight"][3, 5] = math.nan
    refused(
        tmp_path / "eagle",
        config,
        tensors,
        r"model\.safetensors: tensor fc\.weight holds values that are not",
    )
    tensors = heads.medusa()
    tensors["1.0.linear.weight"][0, 0] = math.inf
    write(tmp_path / "medusa", None, tensors, "medusa_lm_head.pt")
    with pytest.raises(ModelError, match=r"medusa_lm_head\.pt: tensor 1\.0\.linear\.weight holds values"):
        load_head(str(tmp_path / "medusa"), TARGET)


@pytest.mark.parametrize("kind", HeadKind)
def test_our_own_layout_without_its_config(tmp_path: Path, kind: HeadKind) -> None:
    if kind is HeadKind.MEDUSA:
        tensors: Tensors = {"medusa.0.blocks.0.weight": torch.zeros(H, H)}
    else:
        tensors = heads.random(1, **tensor_shapes(decoder_head_config(kind, TARGET)))
    write(tmp_path / "bad" / "noconf", None, tensors)
    with pytest.raises(ModelError, match=r"bad/noconf: has no config\.json"):
        load_head(str(tmp_path / "bad" / "noconf"), TARGET)
    with pytest.raises(ModelError, match=r"bad/noconf(/model\.safetensors)?: has no config\.json"):
        load_head(str(tmp_path / "bad" / "noconf" / "model.safetensors"), TARGET)


@pytest.mark.parametrize("layout", LAYOUTS[:7])
def test_a_published_layout_without_its_config(tmp_path: Path, layout: Layout) -> None:
    write(tmp_path / "head", None, layout()[1])
    with pytest.raises(ModelError, match=r"head: has no config\.json"):
        load_head(str(tmp_path / "head"), TARGET)


def test_unknown_layout_lists_tensors(tmp_path: Path) -> None:
    refused(
        tmp_path, {}, {"transformer.wte": torch.zeros(2)}, r"not a layout of draft heads.*transformer\.wte"
    )


class _Runs:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    torch.save({"0.0.linear.weight": _Runs(tmp_path / "ran")}, tmp_path / "heads.pt")
    with pytest.raises(ModelError, match=r"heads\.pt: cannot be read as tensors alone"):
        load_head(str(tmp_path / "heads.pt"), TARGET)
    assert not (tmp_path / "ran").exists()


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither"):
        load_head(str(tmp_path), TARGET)
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ModelError, match=r"expected \.safetensors"):
        load_head(str(tmp_path / "x.txt"), TARGET)
    (tmp_path / "y.pt").write_bytes(b"no pickle")
    with pytest.raises(ModelError, match=r"y\.pt: cannot be read"):
        load_head(str(tmp_path / "y.pt"), TARGET)
    (tmp_path / "z.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"z\.safetensors: cannot be read"):
        load_head(str(tmp_path / "z.safetensors"), TARGET)
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    with pytest.raises(ModelError, match="holds a list"):
        load_head(str(tmp_path / "list.pt"), TARGET)
    with pytest.raises(ModelError, match="no such file or directory"):
        load_head(str(tmp_path / "missing.pt"), TARGET)
