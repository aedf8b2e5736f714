"""What the worker tells scheduler and frontend about the model it serves."""

from __future__ import annotations

from pathlib import Path

from gpu_worker.models.config import ModelConfig
from gpu_worker.weights.resolve import ModelSource
from shared_mem.control import DrafterFacts, ModelFacts


def build_facts(
    source: ModelSource,
    config: ModelConfig,
    *,
    name: str,
    dtype: str,
    kv_cache_dtype: str,
    max_context_tokens: int,
    tokenizer_path: Path,
    drafters: tuple[DrafterFacts, ...],
) -> ModelFacts:
    """ModelFacts of the loaded target; an empty `name` becomes the source's own.

    End-of-text ids and sampling defaults are those of the model's files (generation_config.json before
    config.json, or GGUF metadata); what the files leave open is neutral: temperature 1 and no truncation.
    """
    return ModelFacts(
        name=name or source.name,
        model_path=source.spec or str(source.path),
        revision=source.revision,
        architecture=config.architecture,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        vocab_size=config.vocab_size,
        max_context_tokens=max_context_tokens,
        eos_token_ids=config.eos_token_ids,
        tokenizer_path=str(tokenizer_path),
        sampling_defaults=config.sampling_defaults,
        drafters=drafters,
    )
