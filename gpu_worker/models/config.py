"""A model's shape and settings, the same whatever file they came from; read by builders, runner and facts."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.layers.rotary import RopeConfig
from shared_mem.control import SamplingDefaults


@dataclass(frozen=True)
class Architecture:
    """What a hub architecture name implies and its config.json does not say."""

    model_type: str  # config.json's name of it
    gguf_name: str  # general.architecture of GGUF files of it
    qkv_bias: bool | None = None  # None: as `attention_bias` says
    output_bias: bool | None = None
    qk_norm: bool = False


# Adding a decoder of this shape is one line here and one in models/registry.py.
ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", "llama"),
    "MistralForCausalLM": Architecture("mistral", "llama", qkv_bias=False, output_bias=False),
    "Qwen2ForCausalLM": Architecture("qwen2", "qwen2", qkv_bias=True, output_bias=False),
    "Qwen3ForCausalLM": Architecture("qwen3", "qwen3", qk_norm=True),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes count elements; lengths are in tokens."""

    architecture: str  # a key of ARCHITECTURES
    vocab_size: int  # ids that may be used: the head's rows, cut to those the tokenizer knows
    num_embeddings: int  # rows of the embedding and head in the file, padding included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    # Prompt plus completion. A model with a sliding window is limited to the window, within which plain
    # causal attention is exactly its own.
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
