"""Training that goes on from a finished head: the same function at first, more ids if asked, and only what fits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpu_worker.models.heads.config import HeadConfig, HeadKind
from gpu_worker.training.batches import DraftVocabulary
from gpu_worker.training.dataset import FeatureDataset
from gpu_worker.training.eagle_from_mtp import eagle_from_mtp
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.export import export_head
from gpu_worker.training.features import feature_paths
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.modules.decoder_head import DecoderHead
from gpu_worker.training.modules.medusa import MedusaHeads
from gpu_worker.training.new_head import default_objective, new_head
from gpu_worker.training.objective import DraftObjective
from gpu_worker.training.starting_head import StartingHead
from gpu_worker.weights.head_checkpoint import load_head
from tests.gpu_worker.training.processes import run_python
from tests.gpu_worker.training.samples import draft_objective

_FEW, _MORE = 100, 140


def _dataset(kind: HeadKind, directory: Path) -> FeatureDataset:
    captured = kind is HeadKind.EAGLE3
    return FeatureDataset(directory, feature_paths(directory), hidden=not captured, captured=captured)


def _sums(
    head: DecoderHead | MedusaHeads, dataset: FeatureDataset, ids: torch.Tensor, target: FrozenTarget
) -> torch.Tensor:
    """What validation counts, over one batch."""
    vocabulary = DraftVocabulary.of(ids, target.config.vocab_size)
    objective = default_objective(head.config.kind.value, unroll=3)
    module = DraftObjective(
        head, target.embedding, target.lm_head, vocabulary, objective, torch.float32
    ).eval()
    batch = dataset.load(dataset.training[:12], vocabulary, torch.float32)
    with torch.no_grad():
        return module(batch, 3).sums


@pytest.mark.parametrize("own_lm_head", [False, True])
@pytest.mark.parametrize("kind", list(HeadKind))
def test_it_starts_as_the_head_that_it_goes_on_from(
    kind: HeadKind, own_lm_head: bool, frozen: FrozenTarget, features_dir: Path, tmp_path: Path
) -> None:
    dataset = _dataset(kind, features_dir)
    module, vocabulary = draft_objective(kind, frozen, vocabulary=_FEW, own_lm_head=own_lm_head)
    first = module.head
    with torch.no_grad():
        for parameter in first.parameters():  # nothing at its initial value, own output rows neither
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(3)))
    if isinstance(first, DecoderHead):
        first.set_feature_sizes(torch.full_like(first.feature_scale, 0.5))
    export_head(tmp_path, first, first.config, vocabulary.ids, "", torch.float32)

    start = StartingHead.load(str(tmp_path), kind.value, frozen.config, (0, 1))
    head = new_head(start.training_config(_FEW), frozen, vocabulary.ids, seed=9)
    if isinstance(head, DecoderHead):
        head.set_feature_sizes(torch.full_like(head.feature_scale, 3.0))  # of other data
    start.copy_into(head, vocabulary.ids, frozen)
    expected = _sums(first, dataset, vocabulary.ids, frozen)
    torch.testing.assert_close(_sums(head, dataset, vocabulary.ids, frozen), expected, rtol=1e-4, atol=1e-4)

    ids = DraftVocabulary.most_frequent(dataset.answer_counts(), _MORE, kept=start.ids).ids
    assert len(ids) == _MORE
    assert set(vocabulary.ids.tolist()) < set(ids.tolist())
    wider = new_head(start.training_config(_MORE), frozen, ids, seed=9)
    start.copy_into(wider, ids, frozen)
    old, new = first.tensors(), wider.tensors()
    at = {int(value): row for row, value in enumerate(ids)}
    for name, tensor in new.items():
        if not name.endswith("lm_head.weight"):
            torch.testing.assert_close(tensor, old[name])
            continue
        for row, value in enumerate(vocabulary.ids.tolist()):
            assert torch.equal(tensor[at[value]], old[name][row])
        for value in set(ids.tolist()) - set(vocabulary.ids.tolist()):
            assert torch.equal(tensor[at[value]], frozen.lm_head[value])


@pytest.mark.parametrize("kind", [HeadKind.EAGLE3, HeadKind.MTP, HeadKind.EAGLE])
def test_added_layers_change_nothing_at_first_and_learn(
    kind: HeadKind, frozen: FrozenTarget, features_dir: Path, tmp_path: Path
) -> None:
    dataset = _dataset(kind, features_dir)
    module, vocabulary = draft_objective(kind, frozen, vocabulary=_FEW)
    export_head(tmp_path, module.head, module.head.config, vocabulary.ids, "", torch.float32)
    start = StartingHead.load(str(tmp_path), kind.value, frozen.config, (0, 1))
    config = start.training_config(_FEW, 2)
    assert config.num_layers == 2
    head = new_head(config, frozen, vocabulary.ids, seed=9)
    start.copy_into(head, vocabulary.ids, frozen)
    expected = _sums(module.head, dataset, vocabulary.ids, frozen)
    torch.testing.assert_close(_sums(head, dataset, vocabulary.ids, frozen), expected, rtol=1e-4, atol=1e-4)

    objective = default_objective(kind.value, unroll=2)
    trained = DraftObjective(
        head, frozen.embedding, frozen.lm_head, vocabulary, objective, torch.float32
    ).train()
    trained(dataset.load(dataset.training[:4], vocabulary, torch.float32), 2).loss.backward()
    gradients = {name: p.grad for name, p in head.named_parameters() if name.startswith("layers.1.")}
    for name in ("layers.1.self_attn.o_proj.weight", "layers.1.mlp.down_proj.weight"):
        gradient = gradients[name]
        assert gradient is not None, name
        assert gradient.abs().max() > 0, name


def test_a_tensor_that_is_missing_elsewhere_is_not_made_up(frozen: FrozenTarget, tmp_path: Path) -> None:
    module, vocabulary = draft_objective(HeadKind.MTP, frozen)
    export_head(tmp_path, module.head, module.head.config, vocabulary.ids, "", torch.float32)
    start = StartingHead.load(str(tmp_path), "mtp", frozen.config, (0, 1))
    del start.tensors["layers.0.mlp.up_proj.weight"]
    head = new_head(start.training_config(len(vocabulary.ids), 2), frozen, vocabulary.ids, seed=1)
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp\.up_proj\.weight"):
        start.copy_into(head, vocabulary.ids, frozen)


def test_an_eagle_head_starts_as_an_mtp_head_whose_norms_are_folded(
    frozen: FrozenTarget, features_dir: Path, tmp_path: Path
) -> None:
    dataset = _dataset(HeadKind.EAGLE, features_dir)
    module, vocabulary = draft_objective(HeadKind.MTP, frozen, vocabulary=_FEW, num_layers=2)
    with torch.no_grad():
        for parameter in module.head.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(5)))
    export_head(tmp_path, module.head, module.head.config, vocabulary.ids, "", torch.float32)
    mtp = StartingHead.load(str(tmp_path), "eagle", frozen.config, (0, 1))
    sizes = dataset.input_sizes(frozen.embedding)
    start = mtp.as_kind("eagle", lambda: sizes)
    config = start.training_config(_FEW)
    assert (config.kind, config.num_layers, config.norms_inputs) == (HeadKind.EAGLE, 2, False)
    head = new_head(config, frozen, vocabulary.ids, seed=9)
    start.copy_into(head, vocabulary.ids, frozen)
    assert isinstance(head, DecoderHead)
    assert isinstance(module.head, DecoderHead)
    # Inputs of just those sizes: then a norm is a multiplication, and both heads are one function.
    width = frozen.config.hidden_size
    inputs = torch.randn(2, 5, width, generator=torch.manual_seed(7))
    inputs /= inputs.square().mean(-1, keepdim=True).sqrt()
    embedded, hidden = inputs[0] * sizes.embedding, inputs[1] * sizes.hidden
    old, new = module.head, head
    assert old.embedding_norm is not None
    assert old.feature_norm is not None
    assert old.combine is not None
    assert new.combine is not None
    sides = [old.embedding_norm(embedded), old.feature_norm(hidden)]
    plain = [embedded, hidden]
    if not config.embedding_first:
        sides, plain = sides[::-1], plain[::-1]
    expected = old.combine(torch.cat(sides, -1))
    assert expected.std() > 0.1
    # The norms' epsilon, which counts beside the tiny embeddings, is all that is missing.
    torch.testing.assert_close(new.combine(torch.cat(plain, -1)), expected, rtol=0.02, atol=0.01)
    # Other tokens differ a little: the drafts hardly do.
    before = _sums(module.head, dataset, vocabulary.ids, frozen)
    after = _sums(head, dataset, vocabulary.ids, frozen)
    torch.testing.assert_close(after[:, 1] / after[:, 0], before[:, 1] / before[:, 0], rtol=0.1, atol=0.1)


def test_layers_are_never_taken_away(frozen: FrozenTarget, tmp_path: Path) -> None:
    module, vocabulary = draft_objective(HeadKind.MTP, frozen, num_layers=2)
    export_head(tmp_path, module.head, module.head.config, vocabulary.ids, "", torch.float32)
    start = StartingHead.load(str(tmp_path), "mtp", frozen.config, (0, 1))
    assert start.training_config(_FEW).num_layers == 2
    with pytest.raises(TrainingError, match="layers: 1, the head to start from has 2"):
        start.training_config(_FEW, 1)


def test_a_head_that_does_not_fit_is_refused(frozen: FrozenTarget, tmp_path: Path) -> None:
    module, vocabulary = draft_objective(HeadKind.EAGLE3, frozen)
    head = module.head
    export_head(tmp_path, head, head.config, vocabulary.ids, "", torch.float32)
    with pytest.raises(TrainingError, match="kind is eagle3, the one to train is mtp"):
        StartingHead.load(str(tmp_path), "mtp", frozen.config, (0, 1))
    with pytest.raises(TrainingError, match=r"feature_layers are \[0, 1\], .* extracted from \[1, 2\]"):
        StartingHead.load(str(tmp_path), "eagle3", frozen.config, (1, 2))
    before_norm: HeadConfig = dataclasses.replace(head.config, target_hidden="residual")
    export_head(tmp_path, head, before_norm, vocabulary.ids, "", torch.float32)
    with pytest.raises(TrainingError, match="target_hidden is 'residual'"):
        StartingHead.load(str(tmp_path), "eagle3", frozen.config, (0, 1))


def test_the_command_goes_on_from_a_head_with_more_ids(
    frozen: FrozenTarget, features_dir: Path, tmp_path: Path
) -> None:
    module, vocabulary = draft_objective(HeadKind.MTP, frozen, vocabulary=_FEW)
    first, output = tmp_path / "first", tmp_path / "second"
    export_head(first, module.head, module.head.config, vocabulary.ids, "", torch.float32)
    options = (
        *("-m", "gpu_worker.training.cli", "fit", "mtp", "--features", str(features_dir)),
        *("--output", str(output), f"--start-from={first}", "--steps=1", "--learning-rate=1e-9"),
        *("--rows=40", "--unroll=2", "--threads=1", "--precision=float32"),
        *("--layers=2", "--law-weight=0.75", "--regression-weight=0.25"),
    )
    done = run_python(*options, f"--draft-vocab={_MORE}")
    assert done.returncode == 0, done.stderr
    assert f"| started from | {first} |" in (output / "README.md").read_text()
    one, two = load_file(first / "model.safetensors"), load_file(output / "model.safetensors")
    assert set(one["draft_ids"].tolist()) < set(two["draft_ids"].tolist())
    assert len(two["draft_ids"]) == _MORE
    assert not any(name.startswith("layers.1.") for name in one)
    assert not two["layers.1.mlp.down_proj.weight"].abs().max() > 1e-6  # it starts as the identity
    assert json.loads((output / "config.json").read_text())["draftline_head"]["num_layers"] == 2
    objective = json.loads((output / "summary.json").read_text())["facts"]["objective"]
    assert (objective["law_weight"], objective["regression_weight"]) == (0.75, 0.25)
    torch.testing.assert_close(two["combine.weight"].float(), one["combine.weight"], rtol=1e-2, atol=1e-3)
    other = run_python(*options, f"--draft-vocab={_MORE + 10}")
    assert other.returncode != 0
    assert f"made with draft_vocab {_MORE}, not {_MORE + 10}" in other.stderr


def test_the_command_makes_an_eagle_head_of_an_mtp_head(
    frozen: FrozenTarget, features_dir: Path, tmp_path: Path
) -> None:
    module, vocabulary = draft_objective(HeadKind.MTP, frozen, vocabulary=_FEW, num_layers=2)
    with torch.no_grad():
        for parameter in module.head.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(5)))
    first, output = tmp_path / "mtp", tmp_path / "eagle"
    export_head(first, module.head, module.head.config, vocabulary.ids, "", torch.float32)
    done = run_python(
        *("-m", "gpu_worker.training.cli", "fit", "eagle", "--features", str(features_dir)),
        *("--output", str(output), f"--start-from={first}", "--steps=1", "--learning-rate=1e-9"),
        *("--rows=40", "--unroll=2", "--threads=1", "--precision=float32", f"--draft-vocab={_FEW}"),
    )
    assert done.returncode == 0, done.stderr
    made, mtp = load_head(str(output), frozen.config), load_head(str(first), frozen.config)
    assert (made.config.kind, made.config.num_layers) == (HeadKind.EAGLE, 2)
    sizes = _dataset(HeadKind.EAGLE, features_dir).input_sizes(frozen.embedding)
    _, folded = eagle_from_mtp(mtp.config, mtp.tensors, sizes)
    assert made.tensors.keys() == folded.keys()
    for name, tensor in folded.items():  # written in bfloat16
        torch.testing.assert_close(made.tensors[name].float(), tensor.float(), rtol=1e-2, atol=1e-3, msg=name)
    assert not torch.allclose(made.tensors["combine.weight"].float(), mtp.tensors["combine.weight"], rtol=0.5)
