"""A trained draft model is a checkpoint like any other: what it computes is what it was trained to compute."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

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
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn"):
        StartingDraftModel.load(str(tmp_path), narrower, 0)
    rope = dataclasses.replace(frozen.config.rope, theta=7.0)
    turned = dataclasses.replace(frozen, config=dataclasses.replace(frozen.config, rope=rope))
    with pytest.raises(TrainingError, match=r"rope is .* the target's"):
        StartingDraftModel.load(str(tmp_path), turned, 0)


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
