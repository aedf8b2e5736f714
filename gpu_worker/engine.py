"""Builds one rank: models, pools, sampler and drafters from a WorkerConfig; the model runner and what to tell of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from gpu_worker.attention.cpu import CPUAttention
from gpu_worker.config import WorkerConfig
from gpu_worker.drafters import build_drafters, load_draft_weights
from gpu_worker.errors import DeviceError, ModelError
from gpu_worker.kernels import native
from gpu_worker.kernels.native import ThreadTeam
from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.base import CausalLM
from gpu_worker.request_state import RequestTable
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.weights.facts import build_facts
from gpu_worker.weights.loader import load_model, resolve_dtype
from gpu_worker.weights.resolve import resolve_model
from gpu_worker.weights.tokenizer_export import export_tokenizer
from shared_mem.control import ModelFacts

log = structlog.get_logger()

# Part of the free memory that the KV pool may take when --num-pages does not say. Host memory is shared with the
# other processes and the page cache; a GPU's is the worker's alone.
_CPU_POOL_FRACTION = 0.125
_GPU_POOL_FRACTION = 0.85


@dataclass(frozen=True)
class Engine:
    """A rank that is ready to execute plans."""

    runner: ModelRunner
    facts: ModelFacts
    device: torch.device
    num_pages: int


def build_engine(config: WorkerConfig) -> Engine:
    """Loads everything the configuration names.

    Raises ModelError for a model that cannot be loaded and DeviceError for a device or memory that does not allow it.
    """
    device = _device(config.device)
    team = _kernel_threads(config, device)
    source = resolve_model(config.model)
    dtype = resolve_dtype(config.dtype, device, native_kernels=team is not None)
    tokenizer_path = export_tokenizer(source)
    target = load_model(source, dtype, device, team)
    weights = load_draft_weights(config, target, tokenizer_path, dtype, device, team)
    max_context = _max_context(config, target)
    page_bytes = target.bytes_per_page(config.page_size) + weights.bytes_per_page(config.page_size)
    num_pages = config.num_pages or _fitting_pages(config, page_bytes, max_context, device)
    table = RequestTable(config.max_running_requests, max_context, config.page_size, device)
    sampler = Sampler(config.max_running_requests, target.config.vocab_size, device, team)
    drafters, drafter_facts = build_drafters(config, weights, target, sampler, table, num_pages)
    runner = ModelRunner(
        target,
        target.new_pool(num_pages, config.page_size),
        CPUAttention(device),
        sampler,
        table,
        drafters,
    )
    facts = build_facts(
        source,
        target.config,
        name=config.model_name,
        dtype=dtype,
        kv_cache_dtype=str(target.kv_dtype).removeprefix("torch."),
        max_context_tokens=max_context,  # the scheduler, who knows every rank's pool, limits it further
        tokenizer_path=tokenizer_path,
        drafters=drafter_facts,
    )
    return Engine(runner, facts, device, num_pages)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device: 'cuda' asked for, but torch finds no CUDA device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _kernel_threads(config: WorkerConfig, device: torch.device) -> ThreadTeam | None:
    """The threads of our own CPU kernels; None where the installation has none, with one warning what that costs."""
    if device.type != "cpu":
        return None
    kernels = native.load()
    if kernels is None:
        log.warning(
            "no CPU kernels",
            detail="built without a C++ compiler: torch serves, a decode step takes about three times as long",
        )
        return None
    # What torch still does beside the kernels is small. Its threads would spin after each operation that they shared,
    # on the cores that the kernels' threads need next.
    torch.set_num_threads(1)
    return ThreadTeam(kernels, config.num_threads or len(os.sched_getaffinity(0)))


def _max_context(config: WorkerConfig, target: CausalLM) -> int:
    limit = target.config.max_position_embeddings
    if config.max_context_tokens > limit:
        raise ModelError(
            f"max_context_tokens: {config.max_context_tokens} is above the model's limit {limit}"
        )
    return config.max_context_tokens or limit


def _fitting_pages(config: WorkerConfig, page_bytes: int, max_context: int, device: torch.device) -> int:
    """Pages that fit the free memory, at most what all slots could ever fill; draft KV is part of a page's size."""
    if device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(device)[0] * _GPU_POOL_FRACTION)
    else:
        budget = int(_free_host_memory() * _CPU_POOL_FRACTION)
    useful = config.max_running_requests * -(-(max_context + 1) // config.page_size)
    num_pages = min(useful, budget // page_bytes)
    if num_pages < 2:
        raise DeviceError(f"num_pages: {budget} bytes may be used for KV, one page needs {page_bytes}")
    return num_pages


def _free_host_memory() -> int:
    """Bytes this process may still take: free memory of the host, or what its control group leaves."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        free = min(free, int(text) - int(used.read_text(encoding="ascii")))
    return max(free, 0)
