"""What a head shares with its target and never trains: embedding, output rows, final norm; dequantised once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from gpu_worker.errors import ModelError
from gpu_worker.models.base import TensorSource
from gpu_worker.models.config import ModelConfig
from gpu_worker.weights.gguf_checkpoint import GGUFCheckpoint
from gpu_worker.weights.resolve import ModelSource
from gpu_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint


@dataclass(frozen=True)
class FrozenTarget:
    """The target's tables and where the rest of its tensors can be read."""

    config: ModelConfig
    embedding: torch.Tensor  # [num_embeddings, h] float32
    lm_head: torch.Tensor  # [num_embeddings, h] float32; the embedding itself where they are tied
    final_norm: torch.Tensor  # [h] float32
    tensors: TensorSource

    @classmethod
    def load(cls, source: ModelSource, vocab_size: int) -> FrozenTarget:
        """Reads the tables; vocab_size counts the ids that the served target knows.

        Raises ModelError for a checkpoint that cannot be read.
        """
        checkpoint: GGUFCheckpoint | SafetensorsCheckpoint
        gguf = source.kind == "gguf"
        checkpoint = GGUFCheckpoint(source.path) if gguf else SafetensorsCheckpoint(source.path)
        config = dataclasses.replace(checkpoint.config, vocab_size=vocab_size)
        shape = (config.num_embeddings, config.hidden_size)
        embedding = checkpoint.read("model.embed_tokens.weight", shape).float()
        lm_head = embedding
        if not config.tie_word_embeddings:
            lm_head = checkpoint.read("lm_head.weight", shape).float()
        norm = checkpoint.read("model.norm.weight", (config.hidden_size,)).float()
        return cls(config, embedding, lm_head, norm, checkpoint)

    def layer_tensor(self, layer: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A weight of one decoder layer, float32. Raises ModelError if there is no such layer or tensor."""
        if not 0 <= layer < self.config.num_layers:
            raise ModelError(f"layer {layer}: the target's are 0..{self.config.num_layers - 1}")
        return self.tensors.read(f"model.layers.{layer}.{name}", shape).float()
