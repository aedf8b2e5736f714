"""From a head's tensors to the implementation that runs beside its target."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gpu_worker.models.base import CausalLM
from gpu_worker.models.heads.base import DraftHead
from gpu_worker.models.heads.config import HeadConfig
from gpu_worker.models.heads.native_head import NativeDraftHead
from gpu_worker.models.heads.torch_head import TorchDraftHead
from gpu_worker.models.llama.model import LlamaForCausalLM
from gpu_worker.models.native import NativeCausalLM


def build_head(config: HeadConfig, tensors: Mapping[str, torch.Tensor], target: CausalLM) -> DraftHead:
    """A decoder head in its target's precision and on its device; tensors are those of tensor_shapes(config)."""
    if isinstance(target, NativeCausalLM):
        return NativeDraftHead(config, tensors, target)
    assert isinstance(target, LlamaForCausalLM), "the two implementations of CausalLM"
    return TorchDraftHead(config, tensors, target)
