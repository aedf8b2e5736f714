"""Loads a resolved model onto a device; the one place that picks checkpoint format and default precision."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from gpu_worker.errors import ModelError
from gpu_worker.kernels.native import ThreadTeam
from gpu_worker.layers.linear import ACTIVATION_DTYPES, Precision
from gpu_worker.models.base import EMBEDDING, CausalLM
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.native import NATIVE_PRECISIONS, NativeCausalLM, build_native
from gpu_worker.models.registry import build_model
from gpu_worker.weights.gguf_checkpoint import GGUFCheckpoint
from gpu_worker.weights.resolve import ModelSource
from gpu_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint
from gpu_worker.weights.token_map import read_token_map, usable_vocabulary

_CPU_INFO = Path("/proc/cpuinfo")
_BFLOAT16_CPU_FLAGS = ("avx512_bf16", "amx_bf16")


def resolve_dtype(dtype: str, device: torch.device | str, native_kernels: bool = False) -> Precision:
    """The precision that a `--dtype` names.

    "auto" is int8 on a CPU with our own kernels, else bfloat16 where the device multiplies it, else float32.
    Raises ModelError for an unknown name.
    """
    if dtype == "auto":
        kind = torch.device(device).type
        if kind == "cpu" and native_kernels:
            return "int8"
        native = kind == "cuda" or (kind == "cpu" and _cpu_has_bfloat16())
        return "bfloat16" if native else "float32"
    for precision in ACTIVATION_DTYPES:
        if dtype == precision:
            return precision
    raise ModelError(f"dtype: {dtype!r}, must be auto, {', '.join(ACTIVATION_DTYPES)}")


def load_model(
    source: ModelSource,
    dtype: str,
    device: torch.device | str,
    team: ThreadTeam | None = None,
    lender: CausalLM | None = None,
) -> CausalLM:
    """The model with its weights on `device`; its config.vocab_size counts only ids that its tokenizer knows.

    dtype is a name that resolve_dtype takes. With a `team` of kernel threads int8 and bfloat16 run on the CPU kernels,
    without one (and for float32) in torch. A checkpoint without an embedding takes that and the output head of
    `lender`, in the same memory. Raises ModelError naming the file or tensor at fault.
    """
    device = torch.device(device)
    precision = resolve_dtype(dtype, device, native_kernels=team is not None)
    checkpoint: GGUFCheckpoint | SafetensorsCheckpoint
    if source.kind == "gguf":
        checkpoint = GGUFCheckpoint(source.path)
        known_tokens = checkpoint.num_known_tokens
    else:
        checkpoint = SafetensorsCheckpoint(source.path)
        known_tokens = 0
        if (source.path / "tokenizer.json").exists():
            known_tokens = usable_vocabulary(read_token_map(source.path))
    config = checkpoint.config
    if known_tokens:
        config = dataclasses.replace(config, vocab_size=min(config.num_embeddings, known_tokens))
    if checkpoint.has(EMBEDDING):
        lender = None
    elif lender is not None:
        config = _borrowing(config, lender.config, source)
    if team is not None and device.type == "cpu" and precision in NATIVE_PRECISIONS:
        assert lender is None or isinstance(lender, NativeCausalLM), "draft and target are built alike"
        return build_native(config, checkpoint, precision, team.kernels, team, lender=lender)
    return build_model(config, checkpoint, precision, device, lender)


def _borrowing(config: ModelConfig, lender: ModelConfig, source: ModelSource) -> ModelConfig:
    """The configuration with the lender's vocabulary. Raises ModelError naming the size that does not fit."""
    for name in ("hidden_size", "num_embeddings"):
        mine, theirs = getattr(config, name), getattr(lender, name)
        if mine != theirs:
            raise ModelError(
                f"{source.path}: has no {EMBEDDING}, and {name} is {mine}: the target's, {theirs}, does not fit"
            )
    return dataclasses.replace(config, vocab_size=lender.vocab_size)


def _cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself (AVX512-BF16 or AMX); unknown counts as no."""
    try:
        text = _CPU_INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return any(flag in flags for flag in _BFLOAT16_CPU_FLAGS)
