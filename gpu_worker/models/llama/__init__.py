"""Llama and the decoders of its shape: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3."""

from gpu_worker.models.llama.build import build_llama
from gpu_worker.models.llama.model import LlamaForCausalLM

__all__ = ["LlamaForCausalLM", "build_llama"]
