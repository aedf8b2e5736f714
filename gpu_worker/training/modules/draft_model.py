"""A draft model as a module: a few decoder layers between the target's own embedding and output rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gpu_worker.layers.rotary import RotaryEmbedding
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.heads.config import HeadConfig, HeadKind
from gpu_worker.training.batches import TrainingBatch
from gpu_worker.training.errors import TrainingError
from gpu_worker.training.modules.attention import Layout
from gpu_worker.training.modules.decoder_head import DraftStep, HeadLayers
from gpu_worker.training.modules.parts import Norm


class DraftModel(nn.Module):
    """Parameters bear the hub's names without `model.`; embedding and output rows stay the target's."""

    lookahead = 0

    def __init__(self, target: ModelConfig, num_layers: int) -> None:
        """Raises TrainingError for a target whose layers have parts that are not trained here."""
        super().__init__()
        for part in ("output_bias", "mlp_bias", "qk_norm"):
            if getattr(target, part):
                raise TrainingError(f"target: has {part}, which a draft model is not trained with")
        self.config = HeadConfig(
            kind=HeadKind.EAGLE,  # a layer of plain form: norm, attention, norm, MLP
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=target.vocab_size,
            num_layers=num_layers,
            intermediate_size=target.intermediate_size,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            rope=target.rope,
            qkv_bias=target.qkv_bias,
        )
        self.layers = HeadLayers(self.config)
        self.norm = Norm(target.hidden_size, target.rms_norm_eps)
        self._group = target.num_heads // target.num_kv_heads

    def output_rows(self, step: int) -> None:
        """None: the target's."""
        return

    def unroll(self, batch: TrainingBatch, embedding: torch.Tensor, steps: int) -> Iterator[DraftStep]:
        """Fed with the conversation's own tokens, step k of a row is step 0 of the row k further on."""
        dtype = embedding.dtype
        positions = batch.num_positions
        rotary = RotaryEmbedding(
            self.config.rope, self.config.head_dim, positions, dtype, embedding.device
        ).at(batch.positions)
        everything = Layout.of(
            tuple(type(s)(s.first_token, s.end_token, s.first_token, s.end_token) for s in batch.spans),
            torch.arange(batch.num_tokens, device=embedding.device),
            self._group,
            dtype,
        )
        x = embedding[batch.token_ids]
        for i, layer in enumerate(self.layers):
            last = i == len(self.layers) - 1
            layout = Layout.of(batch.spans, batch.rows, self._group, dtype) if last else everything
            attended, _ = layer.self_attn.first(
                layer.attention_input(x, None), rotary, batch.rows if last else None, layout
            )
            x = layer.finish(x[batch.rows] if last else x, attended)
        normed = self.norm(x)
        yield DraftStep(normed, None)
        for k in range(1, steps):
            yield DraftStep(torch.cat((normed[k:], normed[:k])), None)
