"""ModelConfig from the hub's config.json and generation_config.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

from gpu_worker.errors import ModelError
from gpu_worker.layers.rotary import RopeConfig
from gpu_worker.models.config import ARCHITECTURES, ModelConfig
from shared_mem.control import SamplingDefaults

Json = dict[str, Any]
Number = TypeVar("Number", int, float)

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def parse_hf_config(config: Json, generation: Json, path: Path) -> ModelConfig:
    """The model that `config` (from file `path`) describes; `generation` is {} where that file is missing.

    Reads both layouts of rotary settings: `rope_theta` with `rope_scaling`, and `rope_parameters`. Raises
    ModelError naming the file, the key, what was found and what would be right.
    """
    return _HFConfigParser(config, generation, path).parse()


class _HFConfigParser:
    def __init__(self, config: Json, generation: Json, path: Path) -> None:
        self._config = config
        self._generation = generation
        self._path = path

    def parse(self) -> ModelConfig:
        name = self._architecture()
        architecture = ARCHITECTURES[name]
        if (activation := self._config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise self._error(f"hidden_act is {activation!r}, only 'silu' is supported")
        if quantization := self._config.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise self._error(
                f"quantization_config has quant_method {method!r}: quantised safetensors are not supported;"
                " use the unquantised model or a GGUF file"
            )
        hidden_size, num_heads = self._count("hidden_size"), self._count("num_attention_heads")
        num_kv_heads = self._count("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise self._error(
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        if self._config.get("head_dim") is None and hidden_size % num_heads:
            raise self._error(
                f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}"
            )
        head_dim = self._count("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise self._error(f"head_dim is {head_dim}, rotary embedding needs an even one")
        vocab_size = self._count("vocab_size")
        positions = self._count("max_position_embeddings")
        bias = bool(self._config.get("attention_bias", False))
        return ModelConfig(
            architecture=name,
            vocab_size=vocab_size,
            num_embeddings=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=self._count("intermediate_size"),
            num_layers=self._count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self._number(self._config, "rms_norm_eps", 1e-6),
            max_position_embeddings=min(positions, self._sliding_window() or positions),
            rope=self._rope(positions),
            tie_word_embeddings=bool(self._config.get("tie_word_embeddings", False)),
            qkv_bias=bias if architecture.qkv_bias is None else architecture.qkv_bias,
            output_bias=bias if architecture.output_bias is None else architecture.output_bias,
            mlp_bias=bool(self._config.get("mlp_bias", False)),
            qk_norm=architecture.qk_norm,
            eos_token_ids=self._eos_token_ids(vocab_size),
            sampling_defaults=self._sampling_defaults(),
        )

    def _architecture(self) -> str:
        names = self._config.get("architectures") or []
        for name in names:
            if name in ARCHITECTURES:
                return str(name)
        if not names:  # written by hand or by old tools: model_type alone
            for name, architecture in ARCHITECTURES.items():
                if architecture.model_type == self._config.get("model_type"):
                    return name
        key = "architectures" if names else "model_type"
        raise self._error(
            f"{key} is {self._config.get(key)!r}; known architectures are {', '.join(ARCHITECTURES)}"
        )

    def _sliding_window(self) -> int | None:
        """Tokens of the attention window where any layer has one."""
        window = self._config.get("sliding_window")
        if window is None or not self._config.get("use_sliding_window", True):
            return None
        layer_types = self._config.get("layer_types")
        if layer_types is not None and "sliding_attention" not in layer_types:
            return None
        return self._count("sliding_window")

    def _rope(self, positions: int) -> RopeConfig:
        both = dict(self._config.get("rope_scaling") or {})
        both.update(self._config.get("rope_parameters") or {})
        theta = self._number(both, "rope_theta", self._number(self._config, "rope_theta", 10000.0))
        kind = both.get("rope_type", both.get("type", "default"))
        if kind not in _ROPE_KINDS:
            raise self._error(f"rope_type is {kind!r}, supported are {', '.join(_ROPE_KINDS)}")
        partial = both.get("partial_rotary_factor", self._config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise self._error(f"partial_rotary_factor is {partial!r}, only 1.0 is supported")
        if kind == "default":
            return RopeConfig(theta=theta)
        original = self._config.get("original_max_position_embeddings") or both.get(
            "original_max_position_embeddings", positions
        )
        factor = both.get("factor")
        if factor is None and kind == "yarn":
            factor = positions / original
        if not isinstance(factor, (int, float)) or factor < 1:
            raise self._error(f"{kind} rope scaling has factor {factor!r}, expected a number of at least 1")
        common = {"theta": theta, "kind": kind, "factor": float(factor)}
        if kind == "linear":
            return RopeConfig(**common)
        common["original_max_position_embeddings"] = original
        if kind == "llama3":
            return RopeConfig(
                **common,
                low_freq_factor=self._number(both, "low_freq_factor"),
                high_freq_factor=self._number(both, "high_freq_factor"),
            )
        return RopeConfig(
            **common,
            beta_fast=self._number(both, "beta_fast", 32.0),
            beta_slow=self._number(both, "beta_slow", 1.0),
            attention_factor=self._yarn_attention_factor(both, float(factor)),
            truncate=bool(both.get("truncate", True)),
        )

    def _yarn_attention_factor(self, rope: Json, factor: float) -> float:
        if rope.get("attention_factor") is not None:
            return self._number(rope, "attention_factor")
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            return yarn_mscale(factor, rope["mscale"]) / yarn_mscale(factor, rope["mscale_all_dim"])
        return yarn_mscale(factor)

    def _eos_token_ids(self, vocab_size: int) -> tuple[int, ...]:
        """generation_config.json's, else config.json's; one id, a list, or none at all."""
        found = self._generation.get("eos_token_id", self._config.get("eos_token_id"))
        ids = found if isinstance(found, list) else [] if found is None else [found]
        for token_id in ids:
            if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise self._error(f"eos_token_id has {token_id!r}, must be a token id below {vocab_size}")
        return tuple(dict.fromkeys(ids))

    def _sampling_defaults(self) -> SamplingDefaults:
        neutral, found = SamplingDefaults(), self._generation
        return SamplingDefaults(
            temperature=self._number(found, "temperature", neutral.temperature),
            top_k=int(self._number(found, "top_k", neutral.top_k)),
            top_p=self._number(found, "top_p", neutral.top_p),
            min_p=self._number(found, "min_p", neutral.min_p),
            repetition_penalty=self._number(found, "repetition_penalty", neutral.repetition_penalty),
        )

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(f"{key} is {value!r}, expected a positive integer")
        return value

    def _number(self, table: Json, key: str, default: float | None = None) -> float:
        value = table.get(key)
        if value is None:
            value = default
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._error(f"{key} is {value!r}, expected a number")
        return float(value)

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{self._path}: {message}")


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much YaRN scales cos and sin, and so the attention logits' root (Peng et al. 2023, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
