"""Step three of training: the loop over batches, for any head kind, on one process or several under torchrun."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from gpu_worker.training.batches import DraftVocabulary, TrainingBatch
from gpu_worker.training.checkpoint import Position, RunData, read_checkpoint, restore, save_checkpoint
from gpu_worker.training.dataset import FeatureDataset, Item
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.hit_rates import HitRates, hit_rates
from gpu_worker.training.objective import ROWS, BatchOutcome, DraftObjective
from gpu_worker.training.optimizers import PEAK_RATES, OptimizerKind, Optimizers
from gpu_worker.training.parallel import ParallelKind, free_whole_parameters, parallelize
from gpu_worker.training.schedule import learning_rate
from gpu_worker.training.training_log import Measures, TrainingLog


@dataclass(frozen=True)
class FitSettings:
    """Lengths of the run count optimizer steps."""

    steps: int
    rows_per_batch: int = 2048  # law rows of one step and process
    parallel: ParallelKind = "ddp"  # of no effect without a process group
    optimizer: OptimizerKind = "muon"
    peak_learning_rate: float = 0.0  # 0: the optimizer's usual one
    warmup: int = 100
    weight_decay: float = 0.01
    max_gradient_norm: float = 0.5
    seed: int = 1
    log_every: int = 20
    validate_every: int = 250
    validation_steps: int = 5  # draft steps that validation unrolls
    validation_rows: int = 8192
    checkpoint_every: int = 100


@dataclass(frozen=True)
class FitProgress:
    """Told after each step."""

    step: int
    total: int
    loss: float
    rows_per_second: float
    acceptance: list[float]


class Trainer:
    """Runs, resumes and reports one fit. Under torchrun each process takes every world-size-th batch."""

    def __init__(
        self,
        module: DraftObjective,
        dataset: FeatureDataset,
        data: RunData,
        settings: FitSettings,
        directory: Path,
        facts: dict[str, Any],
    ) -> None:
        """facts: of head and objective; a checkpoint of other facts is refused. The process group is set up already."""
        self._module = module
        self._dataset = dataset
        self._data = data
        self._vocabulary = DraftVocabulary.of(data.draft_ids, dataset.meta.vocab_size)
        self._settings = settings
        self._directory = directory
        every = {
            **facts,
            "seed": settings.seed,
            "rows_per_batch": settings.rows_per_batch,
            "optimizer": settings.optimizer,
        }
        self._facts = json.loads(json.dumps(every))  # plain values, as a checkpoint gives them back
        self._dtype, self._device = module.embedding.dtype, module.embedding.device
        parallel = dist.is_initialized()
        self._rank, self._world = (dist.get_rank(), dist.get_world_size()) if parallel else (0, 1)
        self._wrapped: nn.Module = module
        if parallel:
            self._wrapped = parallelize(module, settings.parallel)
        self._optimizer = Optimizers(
            module,
            settings.optimizer,
            settings.peak_learning_rate or PEAK_RATES[settings.optimizer],
            settings.weight_decay,
        )
        self._parameters = self._optimizer.parameters
        self.position = Position()

    def run(self, report: Callable[[FitProgress], None] | None = None) -> Measures:
        """Trains up to settings.steps, from the directory's checkpoint if there is one; the last validation."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._resume()
        log = TrainingLog(self._directory, self.position.step) if self._rank == 0 else None
        settings, position = self._settings, self.position
        measures: Measures | None = None
        since = _Interval()
        batches = self._epoch()
        while position.step < settings.steps:
            if position.batch + self._world > len(batches):
                position.epoch, position.batch = position.epoch + 1, 0
                batches = self._epoch()
            outcome, norm = self._step(batches[position.batch + self._rank])
            position.batch += self._world
            position.step += 1
            since.add(outcome, norm)
            position.rows += int(outcome.sums[0, ROWS]) * self._world
            if report is not None:
                acceptance = Measures.of(since.sums).acceptance
                report(
                    FitProgress(
                        position.step, settings.steps, outcome.loss.item(), since.rows_per_second, acceptance
                    )
                )
            last = position.step == settings.steps
            if (position.step % settings.log_every == 0 or last) and log is not None:
                log.train(position.step, self._fields(since), Measures.of(since.sums))
                since = _Interval()
            if position.step % settings.validate_every == 0 or last:
                loss, measures = self.validate()
                since.pause()
                if log is not None:
                    if measures.num_rows:
                        log.validation(position.step, {"epoch": position.epoch, "loss": loss}, measures)
                    log.summary(self._summary(measures))
                    log.plot()
            if position.step % settings.checkpoint_every == 0 or last:
                save_checkpoint(
                    self._directory,
                    self._module,
                    self._optimizer,
                    position,
                    self._facts,
                    self._data,
                    chief=self._rank == 0,
                )
        if measures is None:
            measures = self.validate()[1]
        return measures

    def validate(self) -> tuple[float, Measures]:
        """Mean loss over the held-out batches and what would have been accepted."""
        settings = self._settings
        steps = settings.validation_steps
        sums = torch.zeros(steps, 5, dtype=torch.float64)
        losses: list[float] = []
        self._module.eval()
        with torch.no_grad():
            for items in self._dataset.validation(settings.rows_per_batch, settings.validation_rows):
                outcome = self._module(self._load(items), steps)
                sums += outcome.sums.cpu()
                losses.append(outcome.loss.item())
        free_whole_parameters(self._module)
        self._module.train()
        return (sum(losses) / len(losses) if losses else math.nan), Measures.of(sums)

    def hit_rates(self) -> HitRates:
        """Over the held-out batches; () where nothing is held out. Under FSDP within whole_parameters."""
        settings = self._settings
        held_out = self._dataset.validation(settings.rows_per_batch, settings.validation_rows)
        batches = (self._load(items) for items in held_out)
        return hit_rates(self._module, batches, settings.validation_steps)

    def _epoch(self) -> list[list[Item]]:
        """The batches of the present epoch: how many depends on the order, so each epoch must have enough."""
        batches = self._dataset.epoch(self.position.epoch, self._settings.seed, self._settings.rows_per_batch)
        if len(batches) < self._world:
            raise TrainingError(
                f"data: one batch for each of {self._world} processes, there are {len(batches)}"
            )
        return batches

    def _resume(self) -> None:
        state = read_checkpoint(self._directory)
        if state is None:
            return
        self._check(state["facts"])
        self.position = restore(state, self._module, self._optimizer)
        if RunData.of(state).shards != self._data.shards:
            self.position.epoch, self.position.batch = self.position.epoch + 1, 0

    def _step(self, items: list[Item]) -> tuple[BatchOutcome, float]:
        """One optimizer step; its gradient norm, NaN where the step was skipped."""
        settings, position = self._settings, self.position
        torch.manual_seed((settings.seed * 1_000_003 + position.step) * 1009 + self._rank)
        batch = self._load(items)
        share = learning_rate(position.step, peak=1.0, warmup=settings.warmup, total=settings.steps)
        self._optimizer.set_rate(share)
        self._optimizer.zero_grad()
        outcome: BatchOutcome = self._wrapped(batch, self._module.objective.unroll)
        torch.autograd.backward(outcome.loss)
        of_all = nn.utils.clip_grad_norm_(self._parameters, settings.max_gradient_norm)
        norm = (of_all.full_tensor() if isinstance(of_all, DTensor) else of_all).item()
        # Each rank has the norm of the whole averaged gradient, so that all of them skip or none does.
        if math.isfinite(norm):
            self._optimizer.step()
        else:
            position.skipped += 1
        return outcome, norm

    def _load(self, items: list[Item]) -> TrainingBatch:
        return self._dataset.load(items, self._vocabulary, self._dtype).to(self._device)

    def _fields(self, since: _Interval) -> dict[str, float]:
        return {
            "epoch": self.position.epoch,
            "rows": self.position.rows,
            "loss": since.loss,
            "learning_rate": self._optimizer.rate,
            "gradient_norm": since.gradient_norm,
            "rows_per_second": since.rows_per_second,
            "skipped": self.position.skipped,
        }

    def _summary(self, measures: Measures) -> dict[str, Any]:
        return {
            "position": vars(self.position),
            "settings": asdict(self._settings),
            "facts": self._facts,
            "training_conversations": len(self._dataset.training),
            "held_out_conversations": len(self._dataset.held_out),
            "repeating_conversations": self._dataset.num_repeating,  # held out, and not measured either
            "validation": asdict(measures),
            "acceptance_length": measures.acceptance_length,
        }

    def _check(self, theirs: dict[str, Any]) -> None:
        mine, theirs = _flat(self._facts), _flat(theirs)
        for name in sorted(mine.keys() | theirs.keys(), key=lambda name: (name != "head.kind", name)):
            if theirs.get(name) != mine.get(name):
                raise TrainingError(
                    f"{self._directory}: its checkpoint was made with"
                    f" {name} {theirs.get(name)!r}, not {mine.get(name)!r}"
                )


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """Fields of nested objects under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": field for inner, field in _flat(value).items()}
        else:
            flat[name] = value
    return flat


class _Interval:
    """Sums since the last log line."""

    def __init__(self) -> None:
        self.sums = torch.zeros(1, 5, dtype=torch.float64)
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._last = time.monotonic()
        self._seconds = 0.0
        self._rows = 0.0

    def add(self, outcome: BatchOutcome, norm: float) -> None:
        now = time.monotonic()
        self._seconds, self._last = self._seconds + now - self._last, now
        self.sums = self.sums + outcome.sums.cpu()
        self._rows += outcome.sums[0, ROWS].item()
        self._losses.append(outcome.loss.item())
        self._norms.append(norm)

    def pause(self) -> None:
        """What came between this and the last step is not counted."""
        self._last = time.monotonic()

    @property
    def loss(self) -> float:
        return sum(self._losses) / len(self._losses)

    @property
    def gradient_norm(self) -> float:
        return sum(self._norms) / len(self._norms)

    @property
    def rows_per_second(self) -> float:
        return self._rows / self._seconds if self._seconds else 0.0
