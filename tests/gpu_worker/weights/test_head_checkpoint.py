"""Draft heads in every published layout: each tensor arrives under its own name, each convention in the config."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.models.heads.config import SECTION, HeadConfig, HeadKind, decoder_head_config
from gpu_worker.models.heads.tensors import tensor_shapes
from gpu_worker.weights.head_checkpoint import HeadCheckpoint, load_head
from tests.gpu_worker.weights import published_heads as heads
from tests.gpu_worker.weights.published_heads import DRAFT_VOCAB, LAYERS, TARGET, VOCAB, Tensors, write


def check(head: HeadCheckpoint, source: Tensors, renamed: dict[str, str], layers: dict[str, str]) -> None:
    """renamed: canonical name -> name in the file; layers: the same for prefixes. All tensors are accounted for."""
    for name, tensor in head.tensors.items():
        prefix = next((p for p in layers if name.startswith(p)), None)
        theirs = renamed.get(name) or (layers[prefix] + name[len(prefix) :] if prefix is not None else name)
        assert torch.equal(tensor, source[theirs]), f"{name} should be {theirs}"
    assert {name: tuple(t.shape) for name, t in head.tensors.items()} == tensor_shapes(head.config)


@pytest.mark.parametrize("kind", list(HeadKind)[:3])
def test_own_layout_round_trips(tmp_path: Path, kind: HeadKind) -> None:
    config = decoder_head_config(kind, TARGET, num_layers=2, draft_vocab_size=DRAFT_VOCAB)
    config = dataclasses.replace(config, own_lm_head=True, rope=dataclasses.replace(config.rope, theta=77.0))
    tensors = heads.random(1, **tensor_shapes(config)) | {"draft_ids": torch.arange(DRAFT_VOCAB) * 2 + 1}
    write(tmp_path, {SECTION: config.to_json()}, tensors)
    head = load_head(str(tmp_path), TARGET)
    assert head.config == config
    assert head.tensors.keys() == tensors.keys()
    assert all(torch.equal(head.read(name), tensor) for name, tensor in tensors.items())


def test_own_layout_of_medusa_round_trips(tmp_path: Path) -> None:
    config = HeadConfig(
        HeadKind.MEDUSA, heads.H, VOCAB, VOCAB, num_medusa_heads=2, num_medusa_layers=2, own_lm_head=True
    )
    tensors = heads.random(1, **tensor_shapes(config))
    head = load_head(str(write(tmp_path, {SECTION: config.to_json()}, tensors)), TARGET)
    assert head.config == config
    check(head, tensors, {}, {})


def test_eagle(tmp_path: Path) -> None:
    config, tensors = heads.eagle()
    head = load_head(str(write(tmp_path, config, tensors)), TARGET)
    check(head, tensors, {"combine.weight": "fc.weight", "combine.bias": "fc.bias"}, {})
    assert (head.config.kind, head.config.combine_bias, head.config.qkv_bias) == (HeadKind.EAGLE, True, False)
    assert not head.config.norms_attention_input
    assert not head.config.norms_output
    assert not head.config.recycles_normed
    assert not head.config.own_lm_head
    assert not head.config.attends_first_slot
    assert head.config.embedding_first
    assert (head.config.rms_norm_eps, head.config.rope.theta) == (1e-6, 5000.0)
    assert head.config.max_position_embeddings == 128
    assert head.config.draft_vocab_size == head.config.vocab_size == VOCAB


def test_eagle_without_biases_and_with_attention_biases(tmp_path: Path) -> None:
    config, tensors = heads.eagle(bias=False)
    del tensors["fc.bias"], tensors["embed_tokens.weight"]
    tensors |= heads.layer("layers.0.", input_norm=False, bias=True)
    head = load_head(str(write(tmp_path, config, tensors, "pytorch_model.bin")), TARGET)
    assert (head.config.combine_bias, head.config.qkv_bias) == (False, True)
    check(head, tensors, {"combine.weight": "fc.weight"}, {})


def test_eagle3(tmp_path: Path) -> None:
    config, tensors = heads.eagle3()
    head = load_head(str(write(tmp_path, config, tensors)), TARGET)
    tensors["draft_ids"] = torch.arange(0, 2 * DRAFT_VOCAB, 2)
    renamed = {
        "fuse.weight": "fc.weight",
        "embedding_norm.weight": "midlayer.input_layernorm.weight",
        "feature_norm.weight": "midlayer.hidden_norm.weight",
    }
    check(head, tensors, renamed, {"layers.0.": "midlayer."})
    assert head.config.kind is HeadKind.EAGLE3
    assert head.config.own_lm_head
    assert (head.config.draft_vocab_size, head.config.vocab_size) == (DRAFT_VOCAB, VOCAB)
    assert not head.config.residual_is_normed
    assert not head.config.recycles_normed
    assert not head.config.attends_first_slot
    assert head.tensors["draft_ids"].dtype == torch.int64


@pytest.mark.parametrize(
    ("ids", "name", "outputs"),
    [
        ([2, 3, 5], "inputs", (1, 2, 4)),  # the input of layer 2 is the output of layer 1
        ([2, 3, 5], "outputs", (2, 3, 5)),
        ([1, 3, LAYERS], "inputs", (0, 2, LAYERS - 1)),
        (None, "inputs", (1, LAYERS // 2 - 1, LAYERS - 4)),
        (None, "outputs", (1, LAYERS // 2 - 1, LAYERS - 4)),  # no ids: what the original code takes
    ],
)
def test_eagle3_layer_ids_name_inputs_unless_told(tmp_path: Path, ids: Any, name: Any, outputs: Any) -> None:
    extra = {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
    config, tensors = heads.eagle3(eagle_config=extra)
    assert load_head(str(write(tmp_path, config, tensors)), TARGET, name).config.feature_layers == outputs


def test_eagle3_over_the_whole_vocabulary_uses_the_targets_head(tmp_path: Path) -> None:
    config, tensors = heads.eagle3(draft_vocab_size=None)
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    head = load_head(str(write(tmp_path, config, tensors)), TARGET)
    assert (head.config.draft_vocab_size, head.config.own_lm_head) == (VOCAB, False)


def test_eagle3_head_over_the_padded_vocabulary_is_cut_and_ordered(tmp_path: Path) -> None:
    config, tensors = heads.eagle3(draft_vocab_size=heads.PADDED)
    lm_head = heads.random(3, rows=(heads.PADDED, heads.H))["rows"]
    ids = torch.arange(heads.PADDED).flip(0)
    del tensors["t2d"]
    tensors |= {"lm_head.weight": lm_head, "d2t": ids - torch.arange(heads.PADDED)}
    head = load_head(str(write(tmp_path, config, tensors)), TARGET)
    assert head.config.draft_vocab_size == VOCAB
    assert torch.equal(head.read("lm_head.weight"), lm_head.flip(0)[:VOCAB])


def test_draft_ids_of_padding_are_dropped_with_their_rows(tmp_path: Path) -> None:
    config, tensors = heads.eagle3()
    tensors["d2t"][7] = VOCAB + 1 - 7
    tensors["t2d"][14], tensors["t2d"][VOCAB + 1] = False, True
    head = load_head(str(write(tmp_path, config, tensors)), TARGET)
    others = [i for i in range(DRAFT_VOCAB) if i != 7]
    assert head.read("draft_ids").tolist() == [2 * i for i in others]
    assert torch.equal(head.read("lm_head.weight"), tensors["lm_head.weight"][others])


@pytest.mark.parametrize("norm_output", [False, True])
def test_speculators_eagle3(tmp_path: Path, norm_output: bool) -> None:
    config, tensors = heads.speculators_eagle3(norm_output=norm_output)
    head = load_head(str(write(tmp_path, config, tensors)), TARGET)
    tensors["draft_ids"] = torch.arange(0, 2 * DRAFT_VOCAB, 2)
    renamed = {
        "fuse.weight": "fc.weight",
        "embedding_norm.weight": "layers.0.input_layernorm.weight",
        "feature_norm.weight": "layers.0.hidden_norm.weight",
    }
    check(head, tensors, renamed, {})
    assert head.config.feature_layers == (0, 1, 5)
    assert (head.config.residual_is_normed, head.config.recycles_normed) == (True, norm_output)


def test_speculators_zero_bias_of_fc_is_no_bias(tmp_path: Path) -> None:
    config, tensors = heads.speculators_eagle3()
    tensors["fc.bias"] = torch.zeros(heads.H)
    assert "fuse.bias" not in load_head(str(write(tmp_path, config, tensors)), TARGET).tensors


def test_speculators_eagle(tmp_path: Path) -> None:
    config, tensors = heads.speculators_eagle()
    head = load_head(str(write(tmp_path, config, tensors)), TARGET)
    check(head, tensors, {"combine.weight": "fusion_fc.weight"}, {"layers.0.": "transformer."})
    assert (head.config.kind, head.config.combine_bias) == (HeadKind.EAGLE, False)


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_medusa_heads_are_counted_by_their_tensors(tmp_path: Path, num_blocks: int) -> None:
    tensors = heads.medusa(3, num_blocks)
    config = {"medusa_num_heads": 5, "medusa_num_layers": 9, "base_model_name_or_path": "x"}
    write(tmp_path, config, tensors, "medusa_lm_head.pt")
    head = load_head(str(tmp_path / "medusa_lm_head.pt"), TARGET)
    assert (head.config.num_medusa_heads, head.config.num_medusa_layers) == (3, num_blocks)
    assert head.config.own_lm_head
    for k in range(3):
        for i in range(num_blocks):
            for part in ("weight", "bias"):
                theirs = tensors[f"{k}.{i}.linear.{part}"]
                assert torch.equal(head.read(f"medusa.{k}.blocks.{i}.{part}"), theirs)
        assert torch.equal(
            head.read(f"medusa.{k}.lm_head.weight"), tensors[f"{k}.{num_blocks}.weight"][:VOCAB]
        )


def test_medusa_without_a_config(tmp_path: Path) -> None:
    write(tmp_path, None, {f"medusa_head.{name}": t for name, t in heads.medusa(2).items()}, "heads.pt")
    assert load_head(str(tmp_path), TARGET).config.num_medusa_heads == 2


@pytest.mark.parametrize("rows", [heads.PADDED, DRAFT_VOCAB])
def test_medusa_vllm_form_with_token_map(tmp_path: Path, rows: int) -> None:
    tensors = heads.medusa_vllm(rows=rows)
    tensors["token_map"] = torch.arange(DRAFT_VOCAB) * 2
    config = {
        "num_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "truncated_vocab_size": DRAFT_VOCAB,
    }
    head = load_head(str(write(tmp_path, config, tensors)), TARGET)
    assert head.config.draft_vocab_size == DRAFT_VOCAB
    assert head.read("draft_ids").tolist() == tensors["token_map"].tolist()
    for k in range(2):
        theirs = tensors[f"lm_heads.{k}.weight"]
        cut = theirs if rows == DRAFT_VOCAB else theirs[tensors["token_map"]]
        assert torch.equal(head.read(f"medusa.{k}.lm_head.weight"), cut)
        for i in range(2):
            block = head.read(f"medusa.{k}.blocks.{i}.weight")
            assert torch.equal(block, tensors[f"blocks.{k}.layers.{i}.weight"])
            assert not head.read(f"medusa.{k}.blocks.{i}.bias").any()


def test_medusa_vllm_form_with_the_targets_head(tmp_path: Path) -> None:
    tensors = heads.medusa_vllm()
    del tensors["lm_heads.1.weight"]
    head = load_head(str(write(tmp_path, {"original_lm_head": True}, tensors)), TARGET)
    assert (head.config.own_lm_head, head.config.num_medusa_heads) == (False, 2)
    assert not [name for name in head.tensors if "lm_head" in name]


def test_deepseek_mtp_shares_the_targets_head(tmp_path: Path) -> None:
    config, tensors = heads.deepseek_mtp()
    head = load_head(str(write(tmp_path, config, tensors)), TARGET)
    prefix = f"model.layers.{LAYERS}."
    renamed = {
        "combine.weight": f"{prefix}eh_proj.weight",
        "embedding_norm.weight": f"{prefix}enorm.weight",
        "feature_norm.weight": f"{prefix}hnorm.weight",
        "norm.weight": f"{prefix}shared_head.norm.weight",
    }
    check(head, tensors, renamed, {"layers.0.": prefix})
    assert (head.config.kind, head.config.embedding_first) == (HeadKind.MTP, True)
    assert not head.config.own_lm_head
    assert not head.config.recycles_normed
    assert not head.config.attends_first_slot


def test_deepseek_mtp_with_a_head_of_its_own(tmp_path: Path) -> None:
    config, tensors = heads.deepseek_mtp()
    name = f"model.layers.{LAYERS}.shared_head.head.weight"
    tensors[name] = tensors[name] * 2
    head = load_head(str(write(tmp_path, config, tensors)), TARGET)
    assert torch.equal(head.read("lm_head.weight"), tensors[name][:VOCAB])


@pytest.mark.parametrize(("model_type", "added"), [("qwen3", 0.0), ("qwen3_next", 1.0)])
def test_qwen_mtp_norms(tmp_path: Path, model_type: str, added: float) -> None:
    config, tensors = heads.qwen_mtp(model_type=model_type)
    head = load_head(str(write(tmp_path, config, tensors)), TARGET)
    tensors = {name: t + added if "norm" in name else t for name, t in tensors.items()}
    renamed = {
        "combine.weight": "mtp.fc.weight",
        "embedding_norm.weight": "mtp.pre_fc_norm_embedding.weight",
        "feature_norm.weight": "mtp.pre_fc_norm_hidden.weight",
        "norm.weight": "mtp.norm.weight",
    }
    check(head, tensors, renamed, {"layers.0.": "mtp.layers.0."})
    assert (head.config.embedding_first, head.config.recycles_normed) == (True, True)


def test_mimo_mtp_has_the_hidden_state_first(tmp_path: Path) -> None:
    config, tensors = heads.mimo_mtp()
    head = load_head(str(write(tmp_path, config, tensors)), TARGET)
    prefix = "model.mtp_layers.0."
    renamed = {
        "combine.weight": f"{prefix}input_proj.weight",
        "embedding_norm.weight": f"{prefix}token_layernorm.weight",
        "feature_norm.weight": f"{prefix}hidden_layernorm.weight",
        "norm.weight": f"{prefix}final_layernorm.weight",
    }
    check(head, tensors, renamed, {"layers.0.": prefix})
    assert (head.config.embedding_first, head.config.qkv_bias) == (False, True)


Layout = Callable[[], tuple[heads.Json, Tensors]]


@pytest.mark.parametrize("layout", [heads.eagle, heads.eagle3, heads.speculators_eagle3, heads.mimo_mtp])
def test_half_precision_and_shards(tmp_path: Path, layout: Layout) -> None:
    config, tensors = layout()
    tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        write(tmp_path, config, {name: tensors[name] for name in part}, file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    head = load_head(str(tmp_path), TARGET)
    assert {t.dtype for name, t in head.tensors.items() if name != "draft_ids"} == {torch.bfloat16}
