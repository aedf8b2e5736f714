"""Options that several subcommands share, and the target they name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gpu_worker.attention.cpu import CPUAttention
from gpu_worker.kernels import native
from gpu_worker.kernels.native import ThreadTeam
from gpu_worker.models.base import CausalLM
from gpu_worker.weights.loader import load_model
from gpu_worker.weights.resolve import ModelSource

DATA = Path("~/.cache/draftline/training")

Target = Annotated[
    str, typer.Option("--model", help="Target: hub id, directory or GGUF; empty: the embedded model.")
]
Conversations = Annotated[Path, typer.Option(help="Directory of conversation shards.")]
Features = Annotated[Path, typer.Option(help="Directory of feature shards.")]
Threads = Annotated[int, typer.Option("--threads", help="CPU threads; 0: all.")]


def serving_target(source: ModelSource, dtype: str, threads: int) -> tuple[CausalLM, CPUAttention]:
    """The target as it will be served on this machine: on the CPU kernels where they are built."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = native.load() if device.type == "cpu" else None
    count = threads or len(os.sched_getaffinity(0))
    team = None if kernels is None else ThreadTeam(kernels, count)
    torch.set_num_threads(count)
    return load_model(source, dtype, device, team), CPUAttention(device)


def progress_bar() -> Progress:
    """Bar, done of total, time left, and a text of the moment."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        refresh_per_second=2,
    )
