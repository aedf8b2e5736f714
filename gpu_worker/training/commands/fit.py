"""draftline-train fit: trains one head and writes it as the service loads it."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from gpu_worker.config import LayerIdsName
from gpu_worker.layers.linear import ACTIVATION_DTYPES
from gpu_worker.models.heads.config import HeadConfig, HeadKind
from gpu_worker.training.batches import DraftVocabulary
from gpu_worker.training.checkpoint import RunData, read_checkpoint
from gpu_worker.training.commands.options import DATA, Features, LayerIds, Meter, Threads
from gpu_worker.training.dataset import FeatureDataset
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.features import FeatureMeta, feature_paths
from gpu_worker.training.fit import FitProgress, FitSettings, Trainer
from gpu_worker.training.frozen_target import FrozenTarget
from gpu_worker.training.losses import LOSS_KINDS, LossKind
from gpu_worker.training.memory import keep_freed_memory
from gpu_worker.training.new_head import (
    HeadChoices,
    count_parameters,
    default_objective,
)
from gpu_worker.training.objective import DraftObjective, Objective
from gpu_worker.training.optimizers import OPTIMIZER_KINDS, OptimizerKind
from gpu_worker.training.parallel import PARALLEL_KINDS, ParallelKind, whole_parameters
from gpu_worker.training.recipes import DRAFT_MODEL, KINDS, Recipe, reads, recipe
from gpu_worker.training.starting_draft_model import StartingDraftModel
from gpu_worker.training.starting_head import StartingHead
from gpu_worker.training.training_log import Measures
from gpu_worker.weights.loader import resolve_dtype
from gpu_worker.weights.resolve import resolve_model


def fit(
    kind: Annotated[str, typer.Argument(help="eagle3, mtp, eagle, medusa or draft-model.")],
    output: Annotated[Path, typer.Option(help="Where the head, its checkpoint and its logs go.")],
    features: Features = DATA / "features",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps in all.")] = 2000,
    rows: Annotated[int, typer.Option(min=1, help="Rows with a loss in one step and process.")] = 2048,
    unroll: Annotated[
        int, typer.Option(min=0, help="Draft steps (Medusa: heads) in training; 0: the kind's.")
    ] = 0,
    layers: Annotated[
        int, typer.Option(min=0, help="Decoder layers; 0: one, or as many as what it starts from.")
    ] = 0,
    draft_vocab: Annotated[int, typer.Option(min=0, help="Ids that the head may draft; 0: all.")] = 8192,
    own_lm_head: Annotated[
        bool, typer.Option(help="Train output rows too, starting from the target's.")
    ] = False,
    norms: Annotated[
        str, typer.Option(help="EAGLE: full, or original (none before attention and output).")
    ] = "full",
    loss: Annotated[str, typer.Option(help=", ".join(LOSS_KINDS) + ".")] = "cross-entropy",
    decay: Annotated[
        float, typer.Option(min=0, help="Weight of each draft step against the one before; 0: the kind's.")
    ] = 0,
    law_weight: Annotated[
        float | None, typer.Option(min=0, help="Of --loss in the sum. Unset: the kind's.")
    ] = None,
    regression_weight: Annotated[
        float | None,
        typer.Option(min=0, help="Of the distance to the target's hidden states. Unset: the kind's."),
    ] = None,
    optimizer: Annotated[str, typer.Option(help=", ".join(OPTIMIZER_KINDS) + ".")] = "muon",
    learning_rate: Annotated[float, typer.Option(min=0, help="Peak; 0: the optimizer's usual one.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Steps.")] = 100,
    parallel: Annotated[
        str, typer.Option(help="Under torchrun: ddp (each process holds everything) or fsdp (a share of it).")
    ] = "ddp",
    precision: Annotated[
        str, typer.Option(help="bfloat16, float32, or auto: bfloat16 where the device multiplies it.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "auto",
    seed: int = 1,
    validate_every: Annotated[int, typer.Option(min=1, help="Steps.")] = 250,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps.")] = 100,
    start_from: Annotated[
        str,
        typer.Option(
            help="What to go on from, of this kind and in its own form (norms; a head's layers may be added to)."
            " A checkpoint goes before it."
        ),
    ] = "",
    eagle3_layer_ids: LayerIds = "inputs",
    refresh_data: Annotated[bool, typer.Option(help="Resume with the shards that are there now.")] = False,
    threads: Threads = 0,
) -> None:
    """Trains a head from the extracted features, or goes on from the checkpoint in the output directory."""
    _one_of("kind", kind, KINDS)
    if layers and kind == HeadKind.MEDUSA:
        raise TrainingError(f"layers: {layers}, Medusa's heads have no decoder layers")
    choices = None
    if kind != DRAFT_MODEL:
        choices = HeadChoices(
            HeadKind(kind),
            num_layers=layers or 1,
            draft_vocab_size=draft_vocab,
            full_norms=_one_of("norms", norms, ["full", "original"]) == "full",
            own_lm_head=own_lm_head,
            num_medusa_heads=unroll or 4,
        )
    kind_of_loss: LossKind = next(k for k in LOSS_KINDS if k == _one_of("loss", loss, LOSS_KINDS))
    kind_of_optimizer: OptimizerKind = next(
        k for k in OPTIMIZER_KINDS if k == _one_of("optimizer", optimizer, OPTIMIZER_KINDS)
    )
    kind_of_parallel: ParallelKind = next(
        k for k in PARALLEL_KINDS if k == _one_of("parallel", parallel, PARALLEL_KINDS)
    )
    named = _one_of("precision", precision, ["auto", "bfloat16", "float32"])
    on = _device(device)
    dtype = ACTIVATION_DTYPES[resolve_dtype(named, on)]
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    keep_freed_memory()
    run = _Run(
        kind=kind,
        choices=choices,
        layers=layers,
        draft_vocab=draft_vocab,
        unroll=unroll,
        features=features.expanduser(),
        output=output.expanduser(),
        objective=default_objective(
            kind,
            unroll=unroll,
            loss=kind_of_loss,
            decay=decay,
            law_weight=law_weight,
            regression_weight=regression_weight,
        ),
        dtype=dtype,
        device=on,
        start_from=start_from,
        layer_ids_name=eagle3_layer_ids,
        refresh_data=refresh_data,
        settings=FitSettings(
            steps=steps,
            rows_per_batch=rows,
            parallel=kind_of_parallel,
            optimizer=kind_of_optimizer,
            peak_learning_rate=learning_rate,
            warmup=warmup,
            seed=seed,
            validate_every=validate_every,
            checkpoint_every=checkpoint_every,
        ),
    )
    if "WORLD_SIZE" not in os.environ:
        _train(run, chief=True)
        return
    dist.init_process_group("nccl" if on.type == "cuda" else "gloo")  # under torchrun
    try:
        _train(run, chief=dist.get_rank() == 0)
    finally:
        # A wrapped module holds the group and is part of a cycle; were it left to the interpreter's end, gloo's
        # threads would drop their tensors when there is no interpreter any more, and abort the process.
        gc.collect()
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Run:
    """What the command was asked for, checked."""

    kind: str
    choices: HeadChoices | None  # None: a draft model
    layers: int
    draft_vocab: int
    unroll: int  # as it was asked for; 0: the kind's
    features: Path
    output: Path
    objective: Objective
    dtype: torch.dtype
    device: torch.device
    start_from: str  # a head or draft model, or nothing
    layer_ids_name: LayerIdsName  # of such a head, if it is a published EAGLE-3
    refresh_data: bool
    settings: FitSettings


def _train(run: _Run, *, chief: bool) -> None:
    """Trains on this process; the chief speaks and writes."""
    meta = FeatureMeta.read(run.features)
    target = FrozenTarget.load(resolve_model(meta.target), meta.vocab_size)
    start: StartingHead | StartingDraftModel | None = None
    if run.start_from and run.kind == DRAFT_MODEL:
        start = StartingDraftModel.load(run.start_from, target, run.layers)
    elif run.start_from:
        start = StartingHead.load(
            run.start_from, run.kind, target.config, meta.feature_layers, run.layer_ids_name
        )
        run = replace(run, objective=_of_its_heads(run, start.config))
    dataset, data = _data(run, start)
    made = recipe(
        run.kind,
        run.choices,
        run.layers,
        target,
        dataset,
        data.draft_ids,
        run.objective,
        run.settings.seed,
        start,
    )
    settings = replace(run.settings, validation_steps=made.validation_steps)
    module = DraftObjective(
        made.module,
        made.target.embedding,
        made.target.lm_head,
        DraftVocabulary.of(data.draft_ids, dataset.meta.vocab_size),
        run.objective,
        run.dtype,
    ).to(run.device)
    facts = {**made.facts, "precision": str(run.dtype).removeprefix("torch.")}
    trainer = Trainer(module, dataset, data, settings, run.output, facts)
    if chief:
        print(
            f"{run.kind}: {count_parameters(made.module) / 1e6:.2f} M weights,"
            f" {len(dataset.training)} conversations, {len(dataset.held_out)} held out",
            flush=True,
        )
    measures = _with_meter(trainer, settings) if chief else trainer.run()
    with whole_parameters(module):
        if chief:
            _export(run, made, trainer, dataset, data, measures)


def _of_its_heads(run: _Run, start: HeadConfig) -> Objective:
    """Medusa's draft steps are its heads: all of those that it starts with are trained, and no others."""
    if start.kind is not HeadKind.MEDUSA:
        return run.objective
    if run.unroll not in (0, start.num_medusa_heads):
        raise TrainingError(f"unroll: {run.unroll}, {run.start_from} has {start.num_medusa_heads} heads")
    return replace(run.objective, unroll=start.num_medusa_heads)


def _export(
    run: _Run, made: Recipe, trainer: Trainer, dataset: FeatureDataset, data: RunData, measures: Measures
) -> None:
    """Writes what is served and says so."""
    position = trainer.position
    told = {
        "target": dataset.meta.target or "SmolLM2-135M-Instruct",
        "target precision": dataset.meta.precision,
        "conversations": len(dataset.training),
        "optimizer steps": position.step,
        "rows seen": position.rows,
        "unrolled steps": run.objective.unroll,
        "loss": run.objective.loss,
        "optimizer": run.settings.optimizer,
        "draft vocabulary": len(data.draft_ids),
        **({"started from": run.start_from} if run.start_from else {}),
    }
    size = made.export(run.output, measures, trainer.hit_rates(), told)
    length = f"{measures.acceptance_length:.2f} over a chain of {len(measures.acceptance)}"
    accepted = length if measures.num_rows else "not measured, as nothing is held out"
    print(
        f"{run.output}: {size / 1e6:.1f} MB, acceptance length {accepted}, {position.skipped} steps skipped"
    )


def _data(run: _Run, start: StartingHead | StartingDraftModel | None) -> tuple[FeatureDataset, RunData]:
    """The shards of the run's checkpoint if it has one, else all; and the ids to draft, counted in them."""
    features = run.features
    state = read_checkpoint(run.output)
    paths = feature_paths(features)
    if state is not None and not run.refresh_data:
        by_name = {path.name: path for path in paths}
        names = RunData.of(state).shards
        if missing := [name for name in names if name not in by_name]:
            raise TrainingError(f"{features}: {missing[0]}, which the checkpoint was trained on, is gone")
        paths = [by_name[name] for name in names]
    dataset = FeatureDataset(features, paths, **reads(run.kind))
    size = min(run.draft_vocab or dataset.meta.vocab_size, dataset.meta.vocab_size)
    if state is None:
        kept = None if start is None else start.ids
        most = DraftVocabulary.most_frequent(dataset.answer_counts(), size, kept)
        return dataset, RunData(tuple(path.name for path in paths), most.ids)
    ids = RunData.of(state).draft_ids
    wanted = size if start is None else max(size, len(start.ids))
    if len(ids) != wanted:
        raise TrainingError(
            f"{run.output}: its checkpoint was made with draft_vocab {len(ids)}, not {wanted}"
        )
    return dataset, RunData(tuple(path.name for path in paths), ids)


def _with_meter(trainer: Trainer, settings: FitSettings) -> Measures:
    with Meter("fit") as meter:

        def report(done: FitProgress) -> None:
            accepted = " ".join(f"{value:.2f}" for value in done.acceptance)
            note = f"loss {done.loss:.3f}, accepted {accepted}, {done.rows_per_second:.0f} rows/s"
            meter.show(done.step, settings.steps, note)

        return trainer.run(report)


def _device(name: str) -> torch.device:
    """Under torchrun each process of a machine takes a GPU of its own."""
    if _one_of("device", name, ["auto", "cpu", "cuda"]) == "cpu" or not torch.cuda.is_available():
        if name == "cuda":
            raise TrainingError("device: 'cuda', torch finds no GPU")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _one_of(name: str, value: str, allowed: tuple[str, ...] | list[str]) -> str:
    if value not in allowed:
        raise TrainingError(f"{name}: {value!r}, must be one of {', '.join(allowed)}")
    return value
