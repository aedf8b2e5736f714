"""Replicas and shards: two processes train the same head either way, and go on from each other's checkpoints."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpu_worker.models.heads.config import HeadKind
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.optimizers import OPTIMIZER_KINDS, OptimizerKind
from gpu_worker.training.parallel import PARALLEL_KINDS
from tests.gpu_worker.training.parallel_runs import STEPS, copy_at_step_four
from tests.gpu_worker.training.processes import run_python
from tests.gpu_worker.training.samples import trainer

# Sums of the same numbers in another order. Muon's bfloat16 iteration makes more of it.
_LOSS_TOLERANCE: dict[OptimizerKind, float] = {"adamw": 1e-5, "muon": 1e-4}
_WEIGHT_TOLERANCE: dict[OptimizerKind, float] = {"adamw": 1e-6, "muon": 1e-3}


@pytest.fixture(scope="module")
def runs(
    frozen: FrozenTarget, features_dir: Path, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """One directory for each run: of one process first, then those of two."""
    output = tmp_path_factory.mktemp("parallel")
    for optimizer in OPTIMIZER_KINDS:
        run = trainer(
            HeadKind.EAGLE3,
            frozen,
            features_dir,
            output / f"one-{optimizer}",
            steps=STEPS,
            optimizer=optimizer,
        )
        run.run(copy_at_step_four(run, *(output / f"one-then-{kind}-{optimizer}" for kind in PARALLEL_KINDS)))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    script = ("-m", "tests.gpu_worker.training.parallel_runs")
    done = run_python(*torchrun, *script, str(features_dir), str(tiny_model_dir), str(output))
    assert done.returncode == 0, done.stderr
    return output


def _losses(directory: Path, column: str = "loss") -> list[float]:
    with (directory / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    return [float(row[column]) for row in rows]


def _facts(runs: Path) -> list[dict[str, Any]]:
    return [json.loads((runs / f"facts-{rank}.json").read_text()) for rank in range(2)]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves of a nested state under dotted names."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: leaf for key, inner in pairs for k, leaf in _flat(inner, f"{name}.{key}").items()}
    return {name: value}


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
def test_shards_give_the_losses_of_replicas(runs: Path, optimizer: OptimizerKind) -> None:
    tolerance = _LOSS_TOLERANCE[optimizer]
    replicas, shards = _losses(runs / f"ddp-{optimizer}"), _losses(runs / f"fsdp-{optimizer}")
    assert shards == pytest.approx(replicas, rel=tolerance)
    norms = [_losses(runs / f"{kind}-{optimizer}", "gradient_norm") for kind in PARALLEL_KINDS]
    assert norms[1] == pytest.approx(norms[0], rel=10 * tolerance)  # of the whole gradient, not of a shard
    other = next(kind for kind in OPTIMIZER_KINDS if kind != optimizer)
    assert _losses(runs / f"fsdp-{other}") != pytest.approx(shards, rel=10 * tolerance)  # other updates show
    assert _losses(runs / f"one-{optimizer}") != pytest.approx(replicas, rel=tolerance)  # other batches


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
def test_exported_weights_are_whole_and_equal(runs: Path, optimizer: OptimizerKind) -> None:
    replicas, shards = (
        load_file(runs / f"{kind}-{optimizer}" / "head.safetensors") for kind in PARALLEL_KINDS
    )
    assert shards.keys() == replicas.keys()
    for name, mine in shards.items():
        torch.testing.assert_close(mine, replicas[name], rtol=0, atol=_WEIGHT_TOLERANCE[optimizer], msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
def test_checkpoints_have_one_format(runs: Path, optimizer: OptimizerKind) -> None:
    """Plain tensors under the same names, so that a file does not tell how many processes wrote it."""
    one, replicas, shards = (
        torch.load(runs / f"{kind}-{optimizer}" / "checkpoint.pt", weights_only=True)
        for kind in ("one", "ddp", "fsdp")
    )
    flat = _flat(shards)
    for other in (replicas, one):
        expected = _flat(other)
        assert flat.keys() == expected.keys()
        for name, value in flat.items():
            assert type(value) is type(expected[name]), name
            if isinstance(value, torch.Tensor):
                assert value.shape == expected[name].shape, name
                assert value.untyped_storage().nbytes() == value.nbytes, name
    expected = _flat(replicas)
    for name in flat:
        if name.startswith(".module"):
            torch.testing.assert_close(
                flat[name], expected[name], rtol=0, atol=_WEIGHT_TOLERANCE[optimizer], msg=name
            )
        elif name.endswith((".momentum_buffer", ".exp_avg")):
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(
                flat[name], expected[name], rtol=0, atol=_WEIGHT_TOLERANCE[optimizer] * scale, msg=name
            )


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
@pytest.mark.parametrize(("before", "after"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_run_goes_on_under_the_other_kind(
    runs: Path, optimizer: OptimizerKind, before: str, after: str
) -> None:
    resumed = _losses(runs / f"{before}-then-{after}-{optimizer}")
    uninterrupted = _losses(runs / f"{before}-{optimizer}")
    assert resumed[:3] == uninterrupted[:3]
    assert resumed == pytest.approx(uninterrupted, rel=_LOSS_TOLERANCE[optimizer])


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
def test_two_processes_go_on_where_one_was(runs: Path, optimizer: OptimizerKind) -> None:
    replicas, shards = (_losses(runs / f"one-then-{kind}-{optimizer}") for kind in PARALLEL_KINDS)
    assert shards == pytest.approx(replicas, rel=_LOSS_TOLERANCE[optimizer])
    assert shards[:3] == _losses(runs / f"one-{optimizer}")[:3]
    assert shards[3:] != pytest.approx(_losses(runs / f"fsdp-{optimizer}")[3:], rel=1e-3)


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
def test_one_process_goes_on_where_two_were(
    runs: Path, frozen: FrozenTarget, features_dir: Path, optimizer: OptimizerKind
) -> None:
    replicas, shards = (runs / f"{kind}-then-one-{optimizer}" for kind in PARALLEL_KINDS)
    for directory in (replicas, shards):
        trainer(HeadKind.EAGLE3, frozen, features_dir, directory, steps=STEPS, optimizer=optimizer).run()
    assert _losses(shards) == pytest.approx(_losses(replicas), rel=_LOSS_TOLERANCE[optimizer])


@pytest.mark.parametrize("optimizer", OPTIMIZER_KINDS)
@pytest.mark.parametrize("before", ["", "ddp-then-", "one-then-"])
def test_each_process_holds_half(runs: Path, optimizer: OptimizerKind, before: str) -> None:
    """Also where shards were cut from a checkpoint, which must not stay in memory behind them."""
    for facts in _facts(runs):
        held = facts[f"{before}fsdp-{optimizer}"]
        assert held["parameters"] == pytest.approx(held["all"] / 2, rel=0.02)
        assert held["gradients"] == pytest.approx(held["all"] / 2, rel=0.02)
        assert held["states"] == pytest.approx(held["all states"] / 2, rel=0.02)
        replica = facts[f"ddp-{optimizer}"]
        assert replica["parameters"] == replica["all"] == held["all"]
        assert replica["all states"] == held["all states"] >= held["all"]


def test_a_head_without_rows_on_one_process_learns_from_the_other(runs: Path) -> None:
    replicas, shards = runs / "ddp-medusa", runs / "fsdp-medusa"
    assert _losses(shards) == pytest.approx(_losses(replicas), rel=_LOSS_TOLERANCE["adamw"])
    state = torch.load(shards / "checkpoint.pt", weights_only=True)["module"]
    assert state["head.medusa.2.blocks.0.weight"].abs().max() > 0  # zeros until it learns


@pytest.mark.parametrize("kind", PARALLEL_KINDS)
def test_a_step_that_is_not_finite_on_one_process_is_skipped_by_all(runs: Path, kind: str) -> None:
    for facts in _facts(runs):
        spoiled = facts[f"{kind}-spoiled"]
        assert spoiled == {"skipped": 1, "unchanged": [False, True, False, False, False], "finite": True}


def test_matrices_of_uneven_rows_are_updated_as_whole_ones(runs: Path) -> None:
    for facts in _facts(runs):
        assert facts["uneven rows"] < 1e-6
