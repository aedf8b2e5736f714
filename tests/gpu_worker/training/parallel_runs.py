"""What test_parallel.py compares: torchrun starts this on two processes, which make all runs one after the other."""

from __future__ import annotations

import gc
import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gpu_worker.models.heads.config import HeadKind
from gpu_worker.training.fit import FitProgress, Trainer
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.optimizers import OPTIMIZER_KINDS, Optimizers
from gpu_worker.training.parallel import PARALLEL_KINDS, sharded_like, whole_parameters
from gpu_worker.training.training_log import TrainingLog
from gpu_worker.weights.resolve import resolve_model
from tests.gpu_worker.training.samples import trainer

STEPS = 6


def copy_at_step_four(run: Trainer, *copies: Path) -> Any:
    """A report that leaves each of `copies` as a run that was interrupted one step behind its checkpoint."""

    def report(done: FitProgress) -> None:
        if done.step == 4 and run._rank == 0:
            for copy in copies:
                shutil.copytree(run._directory, copy)

    return report


class _Runs:
    def __init__(self, features: Path, model: Path, output: Path) -> None:
        self._features, self._output = features, output
        self._target = FrozenTarget.load(resolve_model(str(model)), 300)

    def new(self, name: str, kind: HeadKind = HeadKind.EAGLE3, **settings: Any) -> Trainer:
        dist.barrier()  # what the run before it has written is there for both
        return trainer(kind, self._target, self._features, self._output / name, steps=STEPS, **settings)

    def compared(self, facts: dict[str, Any]) -> None:
        """All pairs of parallel kinds, with every optimizer."""
        for optimizer in OPTIMIZER_KINDS:
            for kind in PARALLEL_KINDS:
                run = self.new(f"{kind}-{optimizer}", optimizer=optimizer, parallel=kind)
                others = [other for other in (*PARALLEL_KINDS, "one") if other != kind]
                copies = [self._output / f"{kind}-then-{other}-{optimizer}" for other in others]
                run.run(copy_at_step_four(run, *copies))
                facts[f"{kind}-{optimizer}"] = _held(run)
                run.validate()
                assert isinstance(run._module.head.fuse.weight, DTensor) is (kind == "fsdp")
                with whole_parameters(run._module):
                    assert not isinstance(run._module.head.fuse.weight, DTensor)
                    if dist.get_rank() == 0:
                        tensors = {
                            name: value.contiguous() for name, value in run._module.head.tensors().items()
                        }
                        save_file(tensors, self._output / f"{kind}-{optimizer}" / "head.safetensors")
                assert isinstance(run._module.head.fuse.weight, DTensor) is (kind == "fsdp")
            for before in (*PARALLEL_KINDS, "one"):
                for kind in PARALLEL_KINDS:
                    if kind != before:
                        name = f"{before}-then-{kind}-{optimizer}"
                        run = self.new(name, optimizer=optimizer, parallel=kind)
                        run.run()
                        facts[name] = _held(run)

    def short_answers(self) -> None:
        """Medusa, the last head of which has no row on the second process."""
        for kind in PARALLEL_KINDS:
            run = self.new(f"{kind}-medusa", HeadKind.MEDUSA, parallel=kind, optimizer="adamw")
            load = run._dataset.load

            def cut(*arguments: Any, load: Any = load) -> Any:
                batch = load(*arguments)
                if dist.get_rank() == 1:
                    batch.room.clip(max=2, out=batch.room)
                return batch

            run._dataset.load = cut  # type: ignore[method-assign]
            run.run()

    def not_finite(self, facts: dict[str, Any]) -> None:
        """The second step, spoiled on the second process alone."""
        for kind in PARALLEL_KINDS:
            run = self.new(f"{kind}-spoiled", parallel=kind, optimizer="adamw", validate_every=STEPS)
            load, seen = run._dataset.load, []

            def spoil(*arguments: Any, run: Any = run, load: Any = load, seen: Any = seen) -> Any:
                batch = load(*arguments)
                seen.append([_local(p).clone() for p in run._parameters])
                if len(seen) == 2 and dist.get_rank() == 1:
                    batch.features[0, 0] = float("inf")
                return batch

            run._dataset.load = spoil  # type: ignore[method-assign]
            run.run()
            same = [
                all(torch.equal(a, b) for a, b in zip(*pair, strict=True))
                for pair in itertools.pairwise(seen)
            ]
            facts[f"{kind}-spoiled"] = {
                "skipped": run.position.skipped,
                "unchanged": same[: STEPS - 1],
                "finite": all(bool(_local(p).isfinite().all()) for p in run._parameters),
            }


def uneven_rows(facts: dict[str, Any]) -> None:
    """Matrices whose rows two processes cannot share evenly, one with fewer rows than processes; Muon and AdamW."""

    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1), nn.Linear(1, 3, bias=False))

    whole, shards = layers(), layers()
    fully_shard(shards, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    of_whole, of_shards = (Optimizers(module, "muon", 1e-2, 0.1) for module in (whole, shards))
    for step in range(4):
        for a, b in zip(of_whole.parameters, of_shards.parameters, strict=True):
            torch.manual_seed(step)
            a.grad = torch.randn(a.shape)
            b.grad = sharded_like(a.grad, b)
        of_whole.step()
        of_shards.step()
    with whole_parameters(shards):
        facts["uneven rows"] = max(
            float((a - b).abs().max()) for a, b in zip(whole.parameters(), shards.parameters(), strict=True)
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _held(run: Trainer) -> dict[str, int]:
    """Numbers that the run has in all, and that this process keeps in memory: whole storages, not views of them."""

    def numbers(tensors: list[torch.Tensor]) -> int:
        storages = {(s := _local(t).untyped_storage()).data_ptr(): s.nbytes() for t in tensors}
        return sum(storages.values()) // 4  # float32

    parts = run._optimizer._parts
    states = [value for part in parts for state in part.state.values() for value in state.values()]
    return {
        "all": sum(p.numel() for p in run._parameters),
        "parameters": numbers(run._parameters),
        "gradients": numbers([p.grad for p in run._parameters if p.grad is not None]),
        "states": numbers([value for value in states if value.dim()]),
        "all states": sum(value.numel() for value in states if value.dim()),
    }


def main(features: Path, model: Path, output: Path) -> None:
    """Leaves one directory for each run and facts-RANK.json."""
    torch.set_num_threads(1)
    TrainingLog.plot = lambda _: None  # type: ignore[method-assign]  # half of the time, and not compared
    dist.init_process_group("gloo")
    facts: dict[str, Any] = {}
    runs = _Runs(features, model, output)
    runs.compared(facts)
    runs.short_answers()
    runs.not_finite(facts)
    uneven_rows(facts)
    (output / f"facts-{dist.get_rank()}.json").write_text(json.dumps(facts))
    del runs
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
