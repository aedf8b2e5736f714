"""A trained draft model is a checkpoint like any other: what it computes is what it was trained to compute."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.errors import ModelError
from gpu_worker.training.batches import DraftVocabulary
from gpu_worker.training.draft_model import export_draft_model, new_draft_model
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.new_head import default_objective
from gpu_worker.training.objective import DraftObjective, unrolled_logits
from gpu_worker.training.starting_draft_model import StartingDraftModel
from gpu_worker.weights.draft_checkpoint import load_draft_model
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from gpu_worker.weights.tokenizer_export import export_tokenizer
from tests.gpu_worker.forwarding import prompt_logits
from tests.models import make_tiny_llama


def _objective(model: torch.nn.Module, target: FrozenTarget) -> DraftObjective:
    vocabulary = DraftVocabulary.of(torch.arange(target.config.vocab_size), target.config.vocab_size)
    objective = default_objective("draft-model")
    return DraftObjective(model, target.embedding, target.lm_head, vocabulary, objective, torch.float32)


@pytest.mark.parametrize("tie", [True, False])
def test_the_service_computes_what_was_trained(tie: bool, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0}
    source = resolve_model(
        str(make_tiny_llama(tmp_path / "target", num_layers=3, tie=tie, rope=rope, seed=4))
    )
    target = FrozenTarget.load(source, 300)
    model = new_draft_model(target, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter)).copy_(parameter.bfloat16().float())
    draft_ids = torch.arange(0, 300, 3)
    export_draft_model(tmp_path / "draft", model, target, draft_ids, "card")
    lender = load_model(source, "float32", "cpu")
    cpu = torch.device("cpu")
    draft = load_draft_model(str(tmp_path / "draft"), lender, export_tokenizer(source), "float32", cpu, None)
    served = draft.model
    assert served.num_layers == 2
    assert served.embedding is lender.embedding  # type: ignore[attr-defined]
    assert torch.equal(draft.draft_ids, draft_ids)
    ids = torch.tensor([5, 17, 200, 31, 8, 90, 7])
    with torch.no_grad():
        trained = unrolled_logits(_objective(model, target), ids, torch.zeros(7, 0), 1)[0]
    torch.testing.assert_close(trained, prompt_logits(served, ids.tolist()), rtol=1e-4, atol=1e-4)


def test_a_draft_that_does_not_fit_its_lender_is_refused(frozen: FrozenTarget, tmp_path: Path) -> None:
    model = new_draft_model(frozen, 1)
    other = resolve_model(str(make_tiny_llama(tmp_path / "other", hidden_size=32)))
    lender = load_model(other, "float32", "cpu")
    cpu, tokenizer = torch.device("cpu"), export_tokenizer(other)
    export_draft_model(tmp_path / "draft", model, frozen, torch.arange(300), "card")
    with pytest.raises(ModelError, match="hidden_size is 64: the target's, 32"):
        load_draft_model(str(tmp_path / "draft"), lender, tokenizer, "float32", cpu, None)
    export_draft_model(tmp_path / "draft", model, frozen, torch.tensor([5, 3]), "card")
    with pytest.raises(ModelError, match="draft_ids must be ascending ids"):
        load_draft_model(str(tmp_path / "draft"), lender, tokenizer, "float32", cpu, None)


def test_it_goes_on_from_what_was_written(frozen: FrozenTarget, tmp_path: Path) -> None:
    model = new_draft_model(frozen, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)).copy_(parameter.bfloat16().float())
    export_draft_model(tmp_path, model, frozen, torch.arange(0, 300, 3), "card")
    start = StartingDraftModel.load(str(tmp_path), frozen, 0)
    assert torch.equal(start.ids, torch.arange(0, 300, 3))
    again, expected = dict(start.module.named_parameters()), dict(model.named_parameters())
    assert again.keys() == expected.keys()
    for name, parameter in again.items():
        assert torch.equal(parameter, expected[name]), name
    with pytest.raises(TrainingError, match="layers: 1, the draft model to start from has 2"):
        StartingDraftModel.load(str(tmp_path), frozen, 1)
    narrower = FrozenTarget.load(resolve_model(str(make_tiny_llama(tmp_path / "t", hidden_size=32))), 300)
    with pytest.raises(TrainingError, match="hidden_size is 64, the target's 32"):
        StartingDraftModel.load(str(tmp_path), narrower, 0)
    rope = dataclasses.replace(frozen.config.rope, theta=7.0)
    turned = dataclasses.replace(frozen, config=dataclasses.replace(frozen.config, rope=rope))
    with pytest.raises(TrainingError, match=r"rope is .* the target's"):
        StartingDraftModel.load(str(tmp_path), turned, 0)


def test_another_split_into_heads_and_unknown_parts_are_nothing_to_go_on_from(
    frozen: FrozenTarget, tmp_path: Path
) -> None:
    export_draft_model(tmp_path, new_draft_model(frozen, 1), frozen, torch.arange(300), "card")
    told = json.loads((tmp_path / "config.json").read_text())
    heads, size = frozen.config.num_heads, frozen.config.head_dim
    other = {
        "num_attention_heads": 2 * heads,
        "num_key_value_heads": 2 * frozen.config.num_kv_heads,
        "head_dim": size // 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(told | other))
    with pytest.raises(TrainingError, match=f"num_heads is {2 * heads}, the target's {heads}"):
        StartingDraftModel.load(str(tmp_path), frozen, 0)
    (tmp_path / "config.json").write_text(json.dumps(told | {"vocab_size": told["vocab_size"] + 8}))
    with pytest.raises(TrainingError, match=r"num_embeddings is \d+, the target's"):
        StartingDraftModel.load(str(tmp_path), frozen, 0)
    (tmp_path / "config.json").write_text(json.dumps(told))
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"model.layers.0.mlp.up_proj.bias": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(TrainingError, match=r"tensor model\.layers\.0\.mlp\.up_proj\.bias is none"):
        StartingDraftModel.load(str(tmp_path), frozen, 0)
    save_file(weights | {"draft_ids": torch.tensor([3, 300])}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"ascending ids within 0\.\.299"):
        StartingDraftModel.load(str(tmp_path), frozen, 0)


def test_a_whole_model_is_nothing_to_go_on_from(frozen: FrozenTarget, tiny_model_dir: Path) -> None:
    with pytest.raises(TrainingError, match="has an embedding of its own"):
        StartingDraftModel.load(str(tiny_model_dir), frozen, 0)


def test_all_layers_give_the_target_itself(frozen: FrozenTarget, tiny_model_dir: Path) -> None:
    model = new_draft_model(frozen, frozen.config.num_layers)
    target = load_model(resolve_model(str(tiny_model_dir)), "float32", "cpu")
    ids = torch.tensor([4, 9, 33, 70])
    with torch.no_grad():
        logits = unrolled_logits(_objective(model, frozen), ids, torch.zeros(4, 0), 1)[0]
    torch.testing.assert_close(logits, prompt_logits(target, ids.tolist()), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_is_refused(frozen: FrozenTarget, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="layers: 3, the target has 2"):
        new_draft_model(frozen, 3)
    rope = dataclasses.replace(frozen.config.rope, frequency_divisors=(1.0,) * 8)
    divided = dataclasses.replace(frozen, config=dataclasses.replace(frozen.config, rope=rope))
    with pytest.raises(TrainingError, match="divisors"):  # at once, not when all is done
        new_draft_model(divided, 1)
    with pytest.raises(ModelError, match="layer 2"):
        frozen.layer_tensor(2, "input_layernorm.weight", (64,))
    qwen = make_tiny_llama(tmp_path, architecture="Qwen3ForCausalLM")
    with pytest.raises(TrainingError, match="qk_norm"):
        new_draft_model(FrozenTarget.load(resolve_model(str(qwen)), 300), 1)
