"""config.json in both layouts, generation_config.json, and every way in which they can be unusable."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.errors import ModelError
from gpu_worker.layers.rotary import RopeConfig
from gpu_worker.models.config import ARCHITECTURES, ModelConfig
from gpu_worker.models.hf_config import parse_hf_config
from gpu_worker.models.registry import BUILDERS
from shared_mem.control import SamplingDefaults

PATH = Path("somewhere/config.json")
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "rope_theta": 10000.0,
    "sliding_window": None,
}
QWEN2 = {
    **MISTRAL,
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": False,
    "sliding_window": 1024,
}


def parse(config: dict[str, Any], generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return parse_hf_config({**config, **changes}, generation or {}, PATH)


def test_every_architecture_has_a_builder() -> None:
    assert ARCHITECTURES.keys() == BUILDERS.keys()


def test_sizes() -> None:
    config = parse(MISTRAL)
    assert (config.head_dim, config.num_heads, config.num_kv_heads, config.num_layers) == (128, 32, 8, 32)
    assert (config.vocab_size, config.num_embeddings, config.max_position_embeddings) == (32000, 32000, 32768)
    assert not config.tie_word_embeddings


def test_missing_key_value_heads_mean_one_per_head() -> None:
    assert parse(MISTRAL, num_key_value_heads=None).num_kv_heads == 32


def test_biases_and_norms_by_architecture() -> None:
    llama = parse(MISTRAL, architectures=["LlamaForCausalLM"], attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
    qwen2 = parse(QWEN2)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    qwen3 = parse(QWEN2, architectures=["Qwen3ForCausalLM"])
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)


@pytest.mark.parametrize("layout", ["v4", "v5"])
def test_rope_of_both_layouts(layout: str) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if layout == "v4":
        config = parse(MISTRAL, rope_theta=500000.0, rope_scaling=scaling)
    else:
        config = parse(MISTRAL, rope_theta=None, rope_parameters={"rope_theta": 500000.0, **scaling})
    assert config.rope == RopeConfig(
        theta=500000.0,
        kind="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def test_every_yarn_option() -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24,
        "beta_slow": 2,
        "attention_factor": 1.25,
        "truncate": False,
    }
    assert parse(MISTRAL, rope_scaling=scaling).rope == RopeConfig(
        theta=10000.0,
        kind="yarn",
        factor=4.0,
        original_max_position_embeddings=4096,
        beta_fast=24.0,
        beta_slow=2.0,
        attention_factor=1.25,
        truncate=False,
    )


def test_yarn_factor_left_out_is_the_stretch_of_the_context() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 8192}
    rope = parse(MISTRAL, rope_scaling=scaling).rope
    assert rope.factor == 4.0
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_old_name_of_the_rope_kind() -> None:
    assert parse(MISTRAL, rope_scaling={"type": "linear", "factor": 2}).rope.kind == "linear"


def test_sliding_window_limits_the_context() -> None:
    """Within the window, causal attention is the sliding one; beyond it the model is not served."""
    assert parse(MISTRAL, sliding_window=4096).max_position_embeddings == 4096
    assert parse(MISTRAL, sliding_window=65536).max_position_embeddings == 32768


def test_unused_sliding_window_does_not_limit() -> None:
    assert parse(QWEN2).max_position_embeddings == 32768
    assert parse(QWEN2, use_sliding_window=True).max_position_embeddings == 1024
    full = parse(QWEN2, use_sliding_window=True, layer_types=["full_attention"] * 32)
    assert full.max_position_embeddings == 32768


@pytest.mark.parametrize(
    ("in_generation", "in_config", "expected"),
    [
        ({"eos_token_id": [128001, 8, 9]}, 2, None),
        ({"eos_token_id": [7, 8, 7]}, 2, (7, 8)),
        ({"eos_token_id": 5}, 2, (5,)),
        ({"eos_token_id": 0}, 2, (0,)),
        ({}, 2, (2,)),
        ({}, [2, 3], (2, 3)),
        ({}, None, ()),
    ],
)
def test_end_of_text_ids(
    in_generation: dict[str, Any], in_config: Any, expected: tuple[int, ...] | None
) -> None:
    if expected is None:
        with pytest.raises(ModelError, match="eos_token_id has 128001, must be a token id below 32000"):
            parse(MISTRAL, in_generation, eos_token_id=in_config)
    else:
        assert parse(MISTRAL, in_generation, eos_token_id=in_config).eos_token_ids == expected


def test_sampling_defaults() -> None:
    assert parse(MISTRAL).sampling_defaults == SamplingDefaults()
    generation = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "do_sample": True,
    }
    assert parse(MISTRAL, generation).sampling_defaults == SamplingDefaults(
        temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"\['MambaForCausalLM'\]; known .*LlamaForCausalLM.*Qwen3"),
        ({"architectures": [], "model_type": "gpt2"}, "model_type is 'gpt2'; known"),
        ({"hidden_size": None}, "hidden_size is None, expected a positive integer"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32', expected a positive integer"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        ({"hidden_size": 4097}, "hidden_size 4097 is not a multiple of num_attention_heads 32"),
        ({"head_dim": 7}, "head_dim is 7, rotary embedding needs an even one"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu' is supported"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2}},
            "rope_type is 'longrope', supported are def",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear rope scaling has factor None"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "low_freq_factor is None, expected a number",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_theta": "big"}, "rope_theta is 'big', expected a number"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quant_method 'awq': quantised safetensors are not",
        ),
    ],
)
def test_unusable_configs_say_where_and_what(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        parse(MISTRAL, **changes)
    assert str(PATH) in str(raised.value)


def test_model_type_alone_is_enough() -> None:
    config = json.loads(json.dumps(MISTRAL))
    del config["architectures"]
    assert parse(config, model_type="qwen2").architecture == "Qwen2ForCausalLM"
