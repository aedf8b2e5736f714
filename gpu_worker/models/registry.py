"""Which family builds which architecture."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_worker.layers.linear import Precision
from gpu_worker.models.base import CausalLM, TensorSource
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.llama import build_llama

Builder = Callable[[ModelConfig, TensorSource, Precision, torch.device, CausalLM | None], CausalLM]

# ModelConfig accepts exactly these architectures (config.ARCHITECTURES); a test holds the two together.
BUILDERS: dict[str, Builder] = {
    "LlamaForCausalLM": build_llama,
    "MistralForCausalLM": build_llama,
    "Qwen2ForCausalLM": build_llama,
    "Qwen3ForCausalLM": build_llama,
}


def build_model(
    config: ModelConfig,
    tensors: TensorSource,
    precision: Precision,
    device: torch.device,
    lender: CausalLM | None = None,
) -> CausalLM:
    """The model of `config.architecture` with weights from `tensors`, and embedding and output head of `lender`.

    No lender: they are among the tensors. Raises ModelError for a bad tensor.
    """
    return BUILDERS[config.architecture](config, tensors, precision, device, lender)
