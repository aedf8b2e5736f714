"""Options that several subcommands share, and the target they name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gpu_worker.attention.cpu import CPUAttention
from gpu_worker.config import LayerIdsName
from gpu_worker.kernels import native
from gpu_worker.kernels.native import ThreadTeam
from gpu_worker.models.base import CausalLM
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import ModelSource

_SECONDS_BETWEEN_LINES = 30.0
DATA = Path("~/.cache/draftline/training")

Target = Annotated[
    str, typer.Option("--model", help="Target: hub id, directory or GGUF; empty: the embedded model.")
]
Conversations = Annotated[Path, typer.Option(help="Directory of conversation shards.")]
Features = Annotated[Path, typer.Option(help="Directory of feature shards.")]
LayerIds = Annotated[
    LayerIdsName,
    typer.Option(
        "--eagle3-layer-ids", help="What a published EAGLE-3 head's layer ids name: inputs or outputs."
    ),
]
Threads = Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0: all.")]


def serving_target(source: ModelSource, dtype: str, threads: int) -> tuple[CausalLM, CPUAttention]:
    """The target as it will be served on this machine: on the CPU kernels where they are built."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = native.load() if device.type == "cpu" else None
    count = threads or len(os.sched_getaffinity(0))
    team = None if kernels is None else ThreadTeam(kernels, count)
    torch.set_num_threads(count)
    return load_model(source, dtype, device, team), CPUAttention(device)


class Meter:
    """A progress bar on a terminal; elsewhere a line now and then, so that a log file tells how far a run is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            refresh_per_second=2,
        )
        self._task = self._bar.add_task(name, total=None, note="")
        self._terminal = self._bar.console.is_terminal
        self._spoken = time.monotonic()

    def __enter__(self) -> Meter:
        if self._terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._bar.stop()

    def show(self, done: int, total: int, note: str) -> None:
        """How far it is, and a text of the moment."""
        self._bar.update(self._task, completed=done, total=total, note=note)
        now = time.monotonic()
        if not self._terminal and (now - self._spoken > _SECONDS_BETWEEN_LINES or done == total):
            self._spoken = now
            print(f"{self._name} {done}/{total} {note}", flush=True)
