"""EAGLE, EAGLE-2, EAGLE-3 and MTP heads as one module, unrolled over draft steps (see models/heads/config.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from gpu_worker.layers.rotary import RotaryEmbedding
from gpu_worker.models.heads.config import HeadConfig
from gpu_worker.training.batches import TrainingBatch
from gpu_worker.training.modules.attention import DraftKeys, Layout, Rotary, UnrolledAttention
from gpu_worker.training.modules.parts import MLP, Norm, Projection


@dataclass(frozen=True)
class DraftStep:
    """What one draft step gives for every law row."""

    normed: torch.Tensor  # [R, h]: the output head reads it
    recycled: torch.Tensor | None  # [R, h]: stands for the target's hidden state in the next step


class HeadLayer(nn.Module):
    """A decoder layer; the first may have no norm, or attend over [embedding; feature]."""

    def __init__(self, config: HeadConfig, *, first: bool) -> None:
        super().__init__()
        h = config.hidden_size
        self.self_attn = UnrolledAttention(config, 2 * h if first and config.side_input else h)
        has_norm = not first or (config.norms_attention_input and not config.side_input)
        self.input_layernorm = Norm(h, config.rms_norm_eps) if has_norm else None
        self.post_attention_layernorm = Norm(h, config.rms_norm_eps)
        self.mlp = MLP(h, config.intermediate_size)

    def attention_input(self, x: torch.Tensor, side: torch.Tensor | None) -> torch.Tensor:
        """What queries, keys and values are made of."""
        if side is not None:
            return side
        return x if self.input_layernorm is None else self.input_layernorm(x)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream behind the layer."""
        x = x + attended
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class HeadLayers(nn.ModuleList):
    """The layers in order, typed."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(HeadLayer(config, first=i == 0) for i in range(config.num_layers))

    def __iter__(self) -> Iterator[HeadLayer]:
        return cast(Iterator[HeadLayer], super().__iter__())


class DecoderHead(nn.Module):
    """Parameters bear the canonical names of models/heads/tensors.py."""

    lookahead = 0  # step k drafts the token whose law is that of the row k further on
    feature_scale: torch.Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        h, eps = config.hidden_size, config.rms_norm_eps
        self.fuse = Projection(config.feature_size, h, bias=False) if config.feature_layers else None
        self.combine = Projection(2 * h, h, bias=config.combine_bias) if config.combines else None
        self.embedding_norm = Norm(h, eps) if config.norms_inputs else None
        self.feature_norm = Norm(h, eps) if config.norms_inputs else None
        self.layers = HeadLayers(config)
        self.norm = Norm(h, eps) if config.norms_output else None
        self.lm_head = Projection(h, config.draft_vocab_size, bias=False) if config.own_lm_head else None
        self._group = config.num_heads // config.num_kv_heads
        # A few features of every target are hundreds of times larger than the others. Dividing each by its own size
        # and the columns of `fuse` accordingly is the same function, but one that a single learning rate suits.
        self.register_buffer("feature_scale", torch.ones(config.feature_size if self.fuse else 0))

    def set_feature_sizes(self, sizes: torch.Tensor) -> None:
        """sizes [F]: the root mean square of each feature; before training, no effect on heads without `fuse`."""
        if self.fuse is not None:
            self.feature_scale.copy_(1.0 / sizes)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What serving reads, under the canonical names."""
        tensors = dict(self.state_dict())
        scale = tensors.pop("feature_scale")
        if self.fuse is not None:
            tensors["fuse.weight"] = tensors["fuse.weight"] * scale
        return tensors

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """The reverse of `tensors`, with the feature sizes that are set now."""
        scaled = {"feature_scale": self.feature_scale}
        if self.fuse is not None:
            scaled["fuse.weight"] = tensors["fuse.weight"] / self.feature_scale
        self.load_state_dict(tensors | scaled)

    def output_rows(self, step: int) -> torch.Tensor | None:
        """The head's own output rows [V, h]; None: the target's."""
        return None if self.lm_head is None else self.lm_head.weight

    def unroll(self, batch: TrainingBatch, embedding: torch.Tensor, steps: int) -> Iterator[DraftStep]:
        """Draft steps 0 .. steps - 1 from every law row; step k reads the conversation's own token at row + k.

        embedding [num_embeddings, h] in the dtype to compute in. Rows whose answer has ended by then (room < k) give
        values without meaning.
        """
        dtype = embedding.dtype
        rotary = RotaryEmbedding(
            self.config.rope,
            self.config.head_dim,
            batch.num_positions + steps,
            dtype,
            embedding.device,
        )
        layout = Layout.of(batch.spans, batch.rows, self._group, dtype)
        stored: list[DraftKeys] = []
        step = self._first_step(batch, embedding, rotary.at(batch.positions), layout, stored)
        yield step
        for k in range(1, steps):
            assert step.recycled is not None
            ids = batch.token_ids[(batch.rows + k).clamp_max(batch.num_tokens - 1)]
            at = rotary.at(batch.positions[batch.rows] + k)
            x, side = self._inputs(embedding[ids], step.recycled)
            for layer, keys in zip(self.layers, stored, strict=True):
                attention_input = layer.attention_input(x, side)
                side = None
                x = layer.finish(x, layer.self_attn.later(attention_input, at, keys, layout))
            step = self._output(x)
            yield step

    def _first_step(
        self,
        batch: TrainingBatch,
        embedding: torch.Tensor,
        rotary: Rotary,
        layout: Layout,
        stored: list[DraftKeys],
    ) -> DraftStep:
        """All tokens give keys; only law rows go through the last layer."""
        feature = batch.features
        if self.fuse is not None:
            feature = self.fuse((feature * self.feature_scale).to(embedding.dtype))
        x, side = self._inputs(embedding[batch.token_ids], feature)
        for i, layer in enumerate(self.layers):
            last = i == len(self.layers) - 1
            attention_input = layer.attention_input(x, side)
            side = None
            visible = layout if last else self._all_rows(batch, embedding.dtype)
            queries = batch.rows if last else None
            attended, keys = layer.self_attn.first(attention_input, rotary, queries, visible)
            stored.append(keys)
            x = layer.finish(x[batch.rows] if last else x, attended)
        return self._output(x)

    def _all_rows(self, batch: TrainingBatch, dtype: torch.dtype) -> Layout:
        spans = tuple(type(s)(s.first_token, s.end_token, s.first_token, s.end_token) for s in batch.spans)
        return Layout.of(spans, torch.arange(batch.num_tokens, device=batch.rows.device), self._group, dtype)

    def _inputs(
        self, embedded: torch.Tensor, feature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(residual stream, what layer 0 attends over if that is another tensor)."""
        e, g = embedded, feature
        if self.embedding_norm is not None and self.feature_norm is not None:
            e, g = self.embedding_norm(embedded), self.feature_norm(feature)
        if self.config.side_input:
            return g if self.config.residual_is_normed else feature, torch.cat((e, g), dim=-1)
        assert self.combine is not None
        return self.combine(torch.cat((e, g) if self.config.embedding_first else (g, e), dim=-1)), None

    def _output(self, x: torch.Tensor) -> DraftStep:
        normed = x if self.norm is None else self.norm(x)
        return DraftStep(normed, normed if self.config.recycles_normed else x)
