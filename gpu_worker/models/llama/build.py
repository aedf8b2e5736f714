"""From a checkpoint's tensors to a LlamaForCausalLM: reads, fuses and converts layers on a few threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from gpu_worker.layers.attention import Attention
from gpu_worker.layers.embedding import Embedding
from gpu_worker.layers.linear import ACTIVATION_DTYPES, AnyLinear, Linear, Precision, make_linear
from gpu_worker.layers.mlp import GatedMLP
from gpu_worker.layers.norm import RMSNorm
from gpu_worker.layers.rotary import RotaryEmbedding
from gpu_worker.models.base import EMBEDDING, CausalLM, TensorSource
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.llama.model import DecoderLayer, LlamaForCausalLM

_MAX_BUILD_THREADS = 4  # dequantising releases the interpreter lock; more threads only hold more memory


def build_llama(
    config: ModelConfig,
    tensors: TensorSource,
    precision: Precision,
    device: torch.device,
    lender: CausalLM | None = None,
) -> LlamaForCausalLM:
    """Builds the model on `device`, with embedding and output head of `lender`, if there is one, in the same memory.

    Raises ModelError (from `tensors`) for a missing or misshapen tensor.
    """
    return _LlamaBuilder(config, tensors, precision, device, lender).build()


class _LlamaBuilder:
    def __init__(
        self,
        config: ModelConfig,
        tensors: TensorSource,
        precision: Precision,
        device: torch.device,
        lender: CausalLM | None,
    ) -> None:
        self._config = config
        self._lender = lender
        self._tensors = tensors
        self._precision = precision
        self._device = device
        self._dtype = ACTIVATION_DTYPES[precision]

    def build(self) -> LlamaForCausalLM:
        config = self._config
        with ThreadPoolExecutor(max(1, min(_MAX_BUILD_THREADS, os.cpu_count() or 1))) as threads:
            ends = threads.submit(self._embedding_and_head)  # the largest tensors first
            layers = list(threads.map(self._layer, range(config.num_layers)))
            embedding, lm_head = ends.result()
        return LlamaForCausalLM(
            config,
            self._precision,
            embedding,
            RotaryEmbedding(
                config.rope, config.head_dim, config.max_position_embeddings, self._dtype, self._device
            ),
            layers,
            self._norm("model.norm", config.hidden_size),
            lm_head,
        )

    def _embedding_and_head(self) -> tuple[Embedding, AnyLinear]:
        config, lender = self._config, self._lender
        if lender is not None:
            assert isinstance(lender, LlamaForCausalLM), "draft and target are built alike"
            return lender.embedding, lender.lm_head
        shape = (config.num_embeddings, config.hidden_size)
        table = self._tensors.read(EMBEDDING, shape).to(self._device, self._dtype)
        head = table if config.tie_word_embeddings else self._tensors.read("lm_head.weight", shape)
        head = head[: config.vocab_size]  # rows without a token are never computed, so never sampled
        if config.tie_word_embeddings and self._precision != "int8":
            return Embedding(table), Linear(head)  # one memory for both
        return Embedding(table), make_linear(head, None, self._precision, self._device)

    def _layer(self, layer: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{layer}."
        h, d = config.hidden_size, config.head_dim
        q_rows, kv_rows = config.num_heads * d, config.num_kv_heads * d
        attention = Attention(
            layer,
            self._linear(
                [
                    (f"{prefix}self_attn.q_proj", q_rows),
                    (f"{prefix}self_attn.k_proj", kv_rows),
                    (f"{prefix}self_attn.v_proj", kv_rows),
                ],
                h,
                config.qkv_bias,
            ),
            self._linear([(f"{prefix}self_attn.o_proj", h)], q_rows, config.output_bias),
            config.num_heads,
            config.num_kv_heads,
            d,
            self._norm(f"{prefix}self_attn.q_norm", d) if config.qk_norm else None,
            self._norm(f"{prefix}self_attn.k_norm", d) if config.qk_norm else None,
        )
        inner = config.intermediate_size
        gate_up = [(f"{prefix}mlp.gate_proj", inner), (f"{prefix}mlp.up_proj", inner)]
        mlp = GatedMLP(
            self._linear(gate_up, h, config.mlp_bias),
            self._linear([(f"{prefix}mlp.down_proj", h)], inner, config.mlp_bias),
        )
        return DecoderLayer(
            self._norm(f"{prefix}input_layernorm", h),
            attention,
            self._norm(f"{prefix}post_attention_layernorm", h),
            mlp,
        )

    def _linear(self, parts: list[tuple[str, int]], in_features: int, bias: bool) -> AnyLinear:
        """One linear whose rows are those of `parts` (name, rows), in order."""
        weights = [self._tensors.read(f"{name}.weight", (rows, in_features)) for name, rows in parts]
        biases = [self._tensors.read(f"{name}.bias", (rows,)) for name, rows in parts] if bias else []
        return make_linear(_joined(weights), _joined(biases) if bias else None, self._precision, self._device)

    def _norm(self, name: str, size: int) -> RMSNorm:
        weight = self._tensors.read(f"{name}.weight", (size,))
        return RMSNorm(weight.to(self._device, self._dtype), self._config.rms_norm_eps)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
