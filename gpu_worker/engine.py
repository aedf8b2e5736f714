"""Builds one rank: models, pools, sampler and drafters from a WorkerConfig; the model runner and what to tell of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from gpu_worker.attention.cpu import CPUAttention
from gpu_worker.config import WorkerConfig
from gpu_worker.drafting.base import Drafter
from gpu_worker.drafting.draft_model import DraftModelDrafter
from gpu_worker.drafting.ngram import NgramDrafter
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
from gpu_worker.weights.token_map import check_same_token_map
from gpu_worker.weights.tokenizer_export import export_tokenizer
from shared_mem.control import DrafterFacts, ModelFacts
from shared_mem.enums import SpeculationMethod

log = structlog.get_logger()

_LAYERS_PREFIX = "layers:"
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
    draft = _load_draft(config, target, tokenizer_path, dtype, device, team)
    max_context = _max_context(config, target)
    models = [model for model in (target, draft) if model is not None]
    num_pages = config.num_pages or _fitting_pages(config, models, max_context, device)
    attention = CPUAttention(device)
    table = RequestTable(config.max_running_requests, max_context, config.page_size, device)
    sampler = Sampler(config.max_running_requests, target.config.vocab_size, device)
    drafters: dict[SpeculationMethod, Drafter] = {}
    drafter_facts: list[DrafterFacts] = []
    for method in config.speculation:
        path, limit = "", 0
        if method is SpeculationMethod.NGRAM:
            drafters[method] = NgramDrafter(table)
        elif method is SpeculationMethod.DRAFT_MODEL:
            assert draft is not None, "checked by the command line"
            pool = draft.new_pool(num_pages, config.page_size)
            drafters[method] = DraftModelDrafter(
                draft,
                pool,
                CPUAttention(device),
                sampler,
                table,
                config.max_batched_tokens,
            )
            path, limit = config.draft_model, draft.config.max_position_embeddings
        drafter_facts.append(DrafterFacts(int(method), path, config.num_draft_tokens, limit))
    runner = ModelRunner(
        target, target.new_pool(num_pages, config.page_size), attention, sampler, table, drafters
    )
    facts = build_facts(
        source,
        target.config,
        name=config.model_name,
        dtype=dtype,
        kv_cache_dtype=str(target.kv_dtype).removeprefix("torch."),
        max_context_tokens=max_context,  # the scheduler, who knows every rank's pool, limits it further
        tokenizer_path=tokenizer_path,
        drafters=tuple(drafter_facts),
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


def _load_draft(
    config: WorkerConfig,
    target: CausalLM,
    tokenizer_path: Path,
    dtype: str,
    device: torch.device,
    team: ThreadTeam | None,
) -> CausalLM | None:
    """The draft model, checked to speak the target's token ids; `layers:N` is the target cut to N layers."""
    if SpeculationMethod.DRAFT_MODEL not in config.speculation:
        return None
    spec = config.draft_model
    if spec.startswith(_LAYERS_PREFIX):
        count = spec.removeprefix(_LAYERS_PREFIX)
        if not count.isdigit() or not 1 <= int(count) <= target.num_layers:
            raise ModelError(f"draft_model: {spec!r}: layers must be 1..{target.num_layers}")
        return target.truncated(int(count))
    draft_source = resolve_model(spec)
    check_same_token_map(tokenizer_path, export_tokenizer(draft_source))
    draft = load_model(draft_source, dtype, device, team)
    if draft.config.vocab_size < target.config.vocab_size:
        raise ModelError(
            f"draft_model: {spec}: knows {draft.config.vocab_size} ids, the target {target.config.vocab_size}"
        )
    return draft


def _max_context(config: WorkerConfig, target: CausalLM) -> int:
    limit = target.config.max_position_embeddings
    if config.max_context_tokens > limit:
        raise ModelError(
            f"max_context_tokens: {config.max_context_tokens} is above the model's limit {limit}"
        )
    return config.max_context_tokens or limit


def _fitting_pages(
    config: WorkerConfig, models: list[CausalLM], max_context: int, device: torch.device
) -> int:
    """Pages that fit the free memory, at most what all slots could ever fill; draft KV is part of a page's size."""
    page_bytes = sum(model.bytes_per_page(config.page_size) for model in models)
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
