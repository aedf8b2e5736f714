"""Loads a resolved model onto a device; the one place that picks checkpoint format and default precision."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from gpu_worker.errors import ModelError
from gpu_worker.layers.linear import ACTIVATION_DTYPES, Precision
from gpu_worker.models.base import CausalLM
from gpu_worker.models.registry import build_model
from gpu_worker.weights.gguf_checkpoint import GGUFCheckpoint
from gpu_worker.weights.resolve import ModelSource
from gpu_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint
from gpu_worker.weights.token_map import read_token_map, usable_vocabulary

_CPU_INFO = Path("/proc/cpuinfo")
_BFLOAT16_CPU_FLAGS = ("avx512_bf16", "amx_bf16")


def resolve_dtype(dtype: str, device: torch.device | str) -> Precision:
    """The precision that a `--dtype` names; "auto" is bfloat16 where the device multiplies it, else float32.

    Raises ModelError for an unknown name.
    """
    if dtype == "auto":
        kind = torch.device(device).type
        native = kind == "cuda" or (kind == "cpu" and _cpu_has_bfloat16())
        return "bfloat16" if native else "float32"
    for precision in ACTIVATION_DTYPES:
        if dtype == precision:
            return precision
    raise ModelError(f"dtype: {dtype!r}, must be auto, {', '.join(ACTIVATION_DTYPES)}")


def load_model(source: ModelSource, dtype: str, device: torch.device | str) -> CausalLM:
    """The model with its weights on `device`; its config.vocab_size counts only ids that its tokenizer knows.

    dtype is a name that resolve_dtype takes. Raises ModelError naming the file or tensor at fault.
    """
    device = torch.device(device)
    precision = resolve_dtype(dtype, device)
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
    return build_model(config, checkpoint, precision, device)


def _cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself (AVX512-BF16 or AMX); unknown counts as no."""
    try:
        text = _CPU_INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return any(flag in flags for flag in _BFLOAT16_CPU_FLAGS)
