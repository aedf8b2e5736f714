"""The training loop: learns, resumes to the same losses, skips what is not finite, and runs on two processes."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpu_worker.drafting.tree_shape import build_product_tree
from gpu_worker.models.heads.config import SECTION, HeadConfig, HeadKind
from gpu_worker.models.heads.tensors import tensor_shapes
from gpu_worker.training import hit_rates as hit_rates_module
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.export import export_head
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.schedule import learning_rate
from gpu_worker.weights.draft_checkpoint import load_draft_model
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import resolve_model
from tests.gpu_worker.training.processes import run_python
from tests.gpu_worker.training.samples import draft_objective, trainer


def _losses(directory: Path) -> list[tuple[int, str]]:
    with (directory / "train.csv").open(newline="") as file:
        return [(int(row["step"]), row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("kind", list(HeadKind))
def test_every_kind_learns(kind: HeadKind, frozen: FrozenTarget, features_dir: Path, tmp_path: Path) -> None:
    run = trainer(kind, frozen, features_dir, tmp_path, steps=25, validate_every=25, peak_learning_rate=4e-3)
    before, _ = run.validate()
    run.run()
    after, measures = run.validate()
    assert after < before
    assert len(measures.acceptance) == 3
    rates = run.hit_rates()
    assert [len(of_step) for of_step in rates] == [8, 8, 8]
    assert rates[0][0] == pytest.approx(measures.acceptance[0], abs=1e-3)
    assert all(0 < sum(of_step) <= 1 for of_step in rates)
    assert (tmp_path / "progress.png").stat().st_size > 1000
    assert json.loads((tmp_path / "summary.json").read_text())["position"]["step"] == 25


@pytest.mark.parametrize("kind", [HeadKind.EAGLE3, HeadKind.EAGLE])
def test_resuming_gives_the_losses_of_an_uninterrupted_run(
    kind: HeadKind, frozen: FrozenTarget, features_dir: Path, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    one = trainer(kind, frozen, features_dir, whole, steps=11)
    one.run()
    interrupted = trainer(kind, frozen, features_dir, parts, steps=11)

    def stop(progress: object) -> None:
        if interrupted.position.step == 8:  # two steps behind the last checkpoint
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted.run(stop)
    resumed = trainer(kind, frozen, features_dir, parts, steps=11)
    resumed.run()
    assert resumed.position == one.position
    assert _losses(parts) == _losses(whole)
    for (name, mine), theirs in zip(
        resumed._module.state_dict().items(), one._module.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name


def test_a_checkpoint_of_other_settings_is_refused(
    frozen: FrozenTarget, features_dir: Path, tmp_path: Path
) -> None:
    trainer(HeadKind.MTP, frozen, features_dir, tmp_path, steps=3).run()
    with pytest.raises(TrainingError, match="seed 1, not 2"):
        trainer(HeadKind.MTP, frozen, features_dir, tmp_path, steps=6, seed=2).run()


def test_a_step_that_is_not_finite_is_skipped_and_counted(
    frozen: FrozenTarget, features_dir: Path, tmp_path: Path
) -> None:
    run = trainer(HeadKind.EAGLE3, frozen, features_dir, tmp_path, steps=3)
    load, seen = run._dataset.load, []

    def spoiled(*arguments: object) -> object:
        batch = load(*arguments)
        seen.append([p.detach().clone() for p in run._parameters])
        if len(seen) == 2:
            batch.features[0, 0] = float("inf")
        return batch

    run._dataset.load = spoiled  # type: ignore[method-assign]
    run.run()
    assert run.position.skipped == 1
    assert run.position.step == 3
    unchanged = [torch.equal(a, b) for a, b in zip(seen[1], seen[2], strict=True)]
    assert all(unchanged)
    assert not all(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))
    assert all(p.isfinite().all() for p in run._parameters)


def test_learning_rate_rises_falls_and_keeps_a_floor() -> None:
    rates = [learning_rate(step, peak=1.0, warmup=10, total=100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == rates[9] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.02 <= rates[-1] < 0.03


def test_the_command_writes_a_head_and_goes_on_from_it(features_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "head"
    first = _fit(features_dir, output, 4)
    assert first.returncode == 0, first.stderr
    config = HeadConfig.from_json(json.loads((output / "config.json").read_text())[SECTION], "config.json")
    tensors = load_file(output / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == tensor_shapes(config)
    assert tensors["fuse.weight"].dtype is torch.bfloat16
    assert config.vocab_size == 300
    assert config.hit_rates == ()  # so few conversations that none is held out
    assert config.draft_vocab_size == len(tensors["draft_ids"]) == 100
    card = (output / "README.md").read_text()
    assert "Not measured: no conversation was held out." in card
    assert "| greedy |" not in card
    assert not (output / "validation.csv").exists()
    assert len((output / "train.csv").read_text().splitlines()) == 2  # the last step ends the only interval
    second = _fit(features_dir, output, 6)
    assert second.returncode == 0, second.stderr
    assert json.loads((output / "summary.json").read_text())["position"]["step"] == 6
    assert not torch.equal(load_file(output / "model.safetensors")["fuse.weight"], tensors["fuse.weight"])


def test_all_heads_that_medusa_starts_with_are_trained(
    frozen: FrozenTarget, features_dir: Path, tmp_path: Path
) -> None:
    module, vocabulary = draft_objective(HeadKind.MEDUSA, frozen, vocabulary=100)
    heads = module.head.config.num_medusa_heads
    first, output = tmp_path / "first", tmp_path / "second"
    export_head(first, module.head, module.head.config, vocabulary.ids, "", torch.float32)
    options = (
        *("-m", "gpu_worker.training.cli", "fit", "medusa", "--features", str(features_dir), "--steps=1"),
        *("--output", str(output), f"--start-from={first}", "--rows=40", "--threads=1", "--draft-vocab=100"),
    )
    for other in (heads - 1, heads + 1):
        refused = run_python(*options, f"--unroll={other}")
        assert refused.returncode == 1
        assert f"error: unroll: {other}, {first} has {heads} heads" in refused.stderr
    done = run_python(*options)
    assert done.returncode == 0, done.stderr
    assert f"| unrolled steps | {heads} |" in (output / "README.md").read_text()


def test_rates_of_a_few_rows_do_not_add_up_to_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sixths = [[1 / 6] * 6 + [0.0] * 2]  # 0.1667 when rounded
    monkeypatch.setattr(hit_rates_module, "measure_hit_rates", lambda *_: sixths)
    objective: Any = SimpleNamespace(eval=lambda: None, train=lambda: None)
    objective.head = SimpleNamespace(unroll=lambda *_: ())
    objective.embedding = None
    batch: Any = SimpleNamespace(num_rows=6, rows=torch.zeros(6))
    (rates,) = hit_rates_module.hit_rates(objective, [batch], 1)
    assert rates[:6] == (0.1666,) * 6
    assert build_product_tree([rates], 6).num_nodes == 6


def test_an_epoch_with_too_few_batches_is_named(
    frozen: FrozenTarget, features_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(HeadKind.EAGLE3, frozen, features_dir, tmp_path, steps=30)
    first = run._dataset.epoch(0, 1, 48)
    monkeypatch.setattr(run._dataset, "epoch", lambda number, *_: [] if number else first)
    with pytest.raises(TrainingError, match="one batch for each of 1 processes, there are 0"):
        run.run()


def test_another_vocabulary_than_the_checkpoint_has_is_refused(features_dir: Path, tmp_path: Path) -> None:
    output, own = tmp_path / "head", ("--own-lm-head",)
    assert _fit(features_dir, output, 2, options=own).returncode == 0
    other = _fit(features_dir, output, 3, options=own, draft_vocab=90)
    assert other.returncode == 1
    assert other.stderr.strip().endswith("its checkpoint was made with draft_vocab 100, not 90")


def test_the_command_writes_a_draft_model(features_dir: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    first, second, cpu = tmp_path / "first", tmp_path / "second", torch.device("cpu")
    done = _fit(features_dir, first, 3, kind="draft-model", options=("--layers=2",))
    assert done.returncode == 0, done.stderr
    target = load_model(resolve_model(str(tiny_model_dir)), "float32", "cpu")
    draft = load_draft_model(str(first), target, tiny_model_dir, "float32", cpu, None)
    assert draft.model.num_layers == 2
    assert draft.model.config.vocab_size == 300
    assert draft.draft_ids is not None
    assert len(draft.draft_ids) == 100

    options = (f"--start-from={first}", "--learning-rate=1e-9")
    done = _fit(features_dir, second, 1, kind="draft-model", draft_vocab=140, options=options)
    assert done.returncode == 0, done.stderr
    further = load_draft_model(str(second), target, tiny_model_dir, "float32", cpu, None)
    assert further.draft_ids is not None
    assert len(further.draft_ids) == 140
    assert set(draft.draft_ids.tolist()) < set(further.draft_ids.tolist())
    one, two = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    for name in one.keys() - {"draft_ids"}:
        torch.testing.assert_close(two[name].float(), one[name].float(), rtol=1e-2, atol=1e-3, msg=name)


def test_two_processes_train_one_head(features_dir: Path, tmp_path: Path) -> None:
    heads = []
    for parallel in ("ddp", "fsdp"):
        output = tmp_path / parallel
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        done = _fit(features_dir, output, 4, *launcher, parallel=parallel)
        assert done.returncode == 0, done.stderr
        summary = json.loads((output / "summary.json").read_text())
        assert summary["position"]["step"] == 4
        assert summary["settings"]["parallel"] == parallel
        heads.append(load_file(output / "model.safetensors"))
    replicas, shards = heads
    assert shards.keys() == replicas.keys()
    for name, mine in shards.items():
        torch.testing.assert_close(mine, replicas[name], rtol=1e-2, atol=1e-2, msg=name)


def _fit(
    features: Path,
    output: Path,
    steps: int,
    *launcher: str,
    kind: str = "eagle3",
    parallel: str = "ddp",
    draft_vocab: int = 100,
    options: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    values = {"steps": steps, "rows": 40, "unroll": 2, "draft-vocab": draft_vocab, "warmup": 1, "threads": 1}
    arguments = [*(f"--{name}={value}" for name, value in values.items()), *options]
    return run_python(
        *(*launcher, "-m", "gpu_worker.training.cli", "fit", kind),
        *("--features", str(features), "--output", str(output), "--precision", "float32"),
        f"--parallel={parallel}",
        *arguments,
    )
