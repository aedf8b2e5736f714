"""ModelConfig from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_worker.errors import ModelError
from gpu_worker.layers.rotary import RopeConfig
from gpu_worker.models.config import ARCHITECTURES, ModelConfig
from gpu_worker.models.hf_config import yarn_mscale
from shared_mem.control import SamplingDefaults

_REQUIRED = object()


def parse_gguf_config(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_divisors: tuple[float, ...],
    path: Path,
) -> ModelConfig:
    """The model that a GGUF file describes.

    tensor_shapes are by GGUF tensor name, [out, in]; rope_divisors are the rope_freqs tensor's values, ()
    without one. Raises ModelError naming the file, the key, what was found and what would be right.
    """
    arch = metadata.get("general.architecture")
    known = {architecture.gguf_name: name for name, architecture in reversed(ARCHITECTURES.items())}
    if arch not in known:
        raise ModelError(
            f"{path}: general.architecture is {arch!r}; known architectures are {', '.join(sorted(known))}"
        )
    name = known[arch]

    def value(key: str, default: Any = _REQUIRED) -> Any:
        found = metadata.get(f"{arch}.{key}", default)
        if found is _REQUIRED:
            raise ModelError(f"{path}: metadata {arch}.{key} is missing")
        return found

    def count(key: str, default: Any = _REQUIRED) -> int:
        found = value(key, default)
        if isinstance(found, list) and len(set(found)) == 1:
            found = found[0]  # one entry per layer, all alike
        if not isinstance(found, int) or found < 1:
            raise ModelError(f"{path}: metadata {arch}.{key} is {found!r}, expected a positive integer")
        return found

    if (experts := value("expert_count", 0)) != 0:
        raise ModelError(f"{path}: metadata {arch}.expert_count is {experts}, mixtures are not supported")
    hidden_size, num_heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", hidden_size // num_heads)
    if (rotary_dim := count("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(
            f"{path}: metadata {arch}.rope.dimension_count is {rotary_dim}, only the whole head"
            f" ({head_dim}) is supported"
        )
    embedding_shape = tensor_shapes.get("token_embd.weight")
    if embedding_shape is None:
        raise ModelError(f"{path}: tensor token_embd.weight is missing")
    positions = count("context_length")
    window = value("attention.sliding_window", None)
    return ModelConfig(
        architecture=name,
        vocab_size=embedding_shape[0],
        num_embeddings=embedding_shape[0],
        hidden_size=hidden_size,
        intermediate_size=count("feed_forward_length"),
        num_layers=count("block_count"),
        num_heads=num_heads,
        num_kv_heads=count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        max_position_embeddings=min(positions, window or positions),
        rope=_rope(value, rope_divisors, positions, path),
        tie_word_embeddings="output.weight" not in tensor_shapes,
        qkv_bias="blk.0.attn_q.bias" in tensor_shapes,
        output_bias="blk.0.attn_output.bias" in tensor_shapes,
        mlp_bias="blk.0.ffn_up.bias" in tensor_shapes,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_shapes,
        eos_token_ids=_eos_token_ids(metadata),
        sampling_defaults=SamplingDefaults(),
    )


def _rope(value: Any, divisors: tuple[float, ...], positions: int, path: Path) -> RopeConfig:
    theta = float(value("rope.freq_base", 10000.0))
    kind = value("rope.scaling.type", "none")
    factor = float(value("rope.scaling.factor", value("rope.scale_linear", 1.0)))
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"{path}: metadata rope.scaling.type is {kind!r}, supported are none, linear, yarn")
    if factor <= 1.0 or kind == "none":
        return RopeConfig(theta=theta, frequency_divisors=divisors)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor, frequency_divisors=divisors)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=int(value("rope.scaling.original_context_length", positions)),
        beta_fast=float(value("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(value("rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=yarn_mscale(factor) * float(value("rope.scaling.attn_factor", 1.0)),
        frequency_divisors=divisors,
    )


def _eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End of text, of turn and of message: a chat model may end with any of those that the file names."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))
