"""How the processes of one fit share a module, for the loop and its checkpoints: replicas (DDP) or shards (FSDP)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from gpu_worker.training.errors import TrainingError
from gpu_worker.training.objective import DraftObjective

ParallelKind = Literal["ddp", "fsdp"]
PARALLEL_KINDS: tuple[ParallelKind, ...] = ("ddp", "fsdp")

_FSDP_SINCE = "2.13"  # before it, torch looks for no gradients in dataclasses and reduces none of ours


def parallelize(module: DraftObjective, kind: ParallelKind) -> nn.Module:
    """What a training step calls in place of `module`; the process group is set up already.

    "fsdp" changes `module` itself: each parameter becomes a DTensor, of which a process holds its share of the rows.
    Raises TrainingError for a torch that is too old.
    """
    # An answer may be too short for the last Medusa head, which then has no gradient on this process.
    unused = module.head.lookahead > 0
    if kind == "ddp":
        return DistributedDataParallel(module, broadcast_buffers=False, find_unused_parameters=unused)
    if torch.__version__ < _FSDP_SINCE:
        raise TrainingError(f"parallel: fsdp needs torch {_FSDP_SINCE} or later, this is {torch.__version__}")
    mesh = init_device_mesh(module.embedding.device.type, (dist.get_world_size(),))
    # One group: an unrolled step uses every layer several times, so that freeing them in between would gather each as
    # often. Whole parameters and gradients live from the forward to the end of the backward pass.
    sharded = fully_shard(module, mesh=mesh)
    sharded.set_reduce_scatter_unused_params(unused)
    return module


def free_whole_parameters(module: nn.Module) -> None:
    """Gives up what a forward pass without a backward pass has gathered. Nothing to do but under FSDP."""
    if isinstance(module, FSDPModule):
        module.reshard()


def gathered(state: Any, *, keep: bool) -> Any:
    """A nested state_dict with each DTensor whole, None instead where not `keep`. All processes must call it alike."""
    if isinstance(state, DTensor):
        with torch.no_grad():
            whole = state.full_tensor()
        return whole if keep else None
    if isinstance(state, dict):
        return {name: gathered(value, keep=keep) for name, value in state.items()}
    if isinstance(state, list):
        return [gathered(value, keep=keep) for value in state]
    return state


def sharded_like(value: Any, model: torch.Tensor) -> Any:
    """This process's shard of `value` if that is shaped like `model` and `model` is sharded; else `value`.

    Every process has the whole value, so nothing is sent. The shard is a copy, which does not keep the whole alive.
    """
    if isinstance(model, DTensor) and isinstance(value, torch.Tensor) and value.shape == model.shape:
        return distribute_tensor(value, model.device_mesh, model.placements, src_data_rank=None)
    return value


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """Within, each process has all parameters whole, for calls that are not `module`'s own forward.

    All processes must enter; within and on leaving nothing is sent, so that one of them may work on alone.
    """
    free_whole_parameters(module)
    shards = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    for owner, name, parameter in shards:
        setattr(owner, name, nn.Parameter(gathered(parameter, keep=True), requires_grad=False))
    try:
        yield
    finally:
        for owner, name, parameter in shards:
            setattr(owner, name, parameter)
