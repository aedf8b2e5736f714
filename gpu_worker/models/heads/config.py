"""What a draft head computes, every convention a field; written beside its weights, read by builders and training.

One row of a decoder head takes a token t_i and the hidden state H_{i-1} of the token before it and predicts t_{i+1}:

    e = embedding(t_i)                      the target's table, frozen
    g = fuse(features)                      EAGLE-3, target rows only; otherwise the feature itself
    x = combine([norm(e); norm(g)])         EAGLE-1/2 (no norms), MTP; [g; e] unless embedding_first
    x = g, layer 0 attends over [norm(e); norm(g)]        EAGLE-3: `side_input`
    y = layers(x)
    logits = lm_head(norm(y))               over draft_vocab_size ids
    recycled = norm(y) or y                 stands for g in the next draft step
"""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from gpu_worker.draft_tree import MAX_NODES
from gpu_worker.errors import ModelError
from gpu_worker.layers.rotary import RopeConfig
from gpu_worker.models.config import ModelConfig

SECTION = "draftline_head"  # of config.json


class HeadKind(enum.StrEnum):
    """Which family a head belongs to."""

    EAGLE = "eagle"  # EAGLE-1 and -2: arXiv 2401.15077, 2406.16858
    EAGLE3 = "eagle3"  # arXiv 2503.01840
    MTP = "mtp"  # DeepSeek-V3: arXiv 2412.19437, section 2.2
    MEDUSA = "medusa"  # arXiv 2401.10774


@dataclass(frozen=True)
class HeadConfig:
    """Sizes count elements. Fields that a kind has no use for keep their defaults."""

    kind: HeadKind
    hidden_size: int
    vocab_size: int  # ids of the target
    draft_vocab_size: int  # rows of the head's output; vocab_size if it drafts every id
    # decoder heads
    num_layers: int = 1
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 0
    rope: RopeConfig = field(default_factory=RopeConfig)
    feature_layers: tuple[int, ...] = ()  # EAGLE-3: outputs of these target layers (0-based) are fused
    target_hidden: Literal["normed", "residual"] = (
        "normed"  # the others: behind or before the target's final norm
    )
    embedding_first: bool = True  # order in combine's input
    combine_bias: bool = False
    qkv_bias: bool = False
    norms_attention_input: bool = True  # False: EAGLE's original form leaves input_layernorm out (of layer 0)
    norms_output: bool = True  # False: EAGLE's original form has no final norm
    residual_is_normed: bool = False  # EAGLE-3: the residual stream starts from norm(g)
    recycles_normed: bool = False
    own_lm_head: bool = False  # False: rows of the target's
    attends_first_slot: bool = True  # trained with the pair (t_0, zeros) in slot 0
    # Medusa
    num_medusa_heads: int = 0
    num_medusa_layers: int = 1  # residual blocks of each head
    # Medusa and EAGLE's fixed trees: how often the candidate of each rank is right, by depth, given a right parent;
    # measured in training (drafting/tree_shape.py makes a tree of it). Empty: not measured.
    hit_rates: tuple[tuple[float, ...], ...] = ()

    @property
    def side_input(self) -> bool:
        """Whether layer 0's queries, keys and values read [norm(e); norm(g)]."""
        return self.kind is HeadKind.EAGLE3

    @property
    def combines(self) -> bool:
        """Whether embedding and feature become one hidden state before the layers."""
        return self.kind in (HeadKind.EAGLE, HeadKind.MTP)

    @property
    def norms_inputs(self) -> bool:
        """Whether embedding and feature have norms of their own."""
        return self.kind in (HeadKind.EAGLE3, HeadKind.MTP)

    @property
    def feature_size(self) -> int:
        """F: floats per target row that the head reads."""
        return self.hidden_size * max(1, len(self.feature_layers))

    def hidden_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The target layers whose outputs are this head's features; none: the state behind the final norm."""
        if self.feature_layers or self.target_hidden == "normed":
            return self.feature_layers
        return (num_target_layers - 1,)

    def check_fits(self, target: ModelConfig, where: str) -> None:
        """Raises ModelError naming the field where the head does not belong to this target."""
        for name in ("hidden_size", "vocab_size"):
            mine, theirs = getattr(self, name), getattr(target, name)
            if mine != theirs:
                raise ModelError(f"{where}: {name} is {mine}, the target's is {theirs}")
        for layer in self.feature_layers:
            if not 0 <= layer < target.num_layers:
                raise ModelError(
                    f"{where}: feature_layers has {layer}, the target's layers are 0..{target.num_layers - 1}"
                )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ModelError(
                f"{where}: draft_vocab_size is {self.draft_vocab_size}, not 1..{self.vocab_size}"
            )

    def to_json(self) -> dict[str, Any]:
        """The object that from_json reads back; belongs under SECTION in config.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any], where: str) -> HeadConfig:
        """Raises ModelError naming the field that is unknown, missing, of another type or out of range."""
        unknown = sorted(set(fields) - {known.name for known in dataclasses.fields(cls)})
        if unknown:
            raise ModelError(f"{where}: unknown field {unknown[0]!r}")
        try:
            config = msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ModelError(f"{where}: {error}") from error
        config._check_sizes(where)
        return config

    def _check_sizes(self, where: str) -> None:
        """Raises ModelError naming the first size that is not positive, or a depth whose hit rates are none."""
        sizes = ["hidden_size", "vocab_size", "draft_vocab_size", "rms_norm_eps"]
        if self.kind is HeadKind.MEDUSA:
            sizes += ["num_medusa_heads", "num_medusa_layers"]
        else:
            sizes += ["num_layers", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"]
            sizes += ["max_position_embeddings"]
        for name in sizes:
            if (value := getattr(self, name)) <= 0:
                raise ModelError(f"{where}: {name} is {value}, must be above 0")
        for depth, rates in enumerate(self.hit_rates, start=1):
            if not 1 <= len(rates) <= MAX_NODES:
                raise ModelError(
                    f"{where}: hit_rates of depth {depth} are of {len(rates)} ranks, must be 1..{MAX_NODES}"
                )
            if not all(0.0 <= rate <= 1.0 for rate in rates) or math.fsum(rates) > 1.0 + 1e-6:
                raise ModelError(
                    f"{where}: hit_rates of depth {depth} are {list(rates)}, must be within 0..1 and 1 at most in sum"
                )


def decoder_head_config(
    kind: HeadKind,
    target: ModelConfig,
    *,
    num_layers: int = 1,
    draft_vocab_size: int | None = None,
    feature_layers: tuple[int, ...] | None = None,
    full_norms: bool = True,
) -> HeadConfig:
    """The configuration of a new head for `target`, shaped like one of its layers, as training starts it.

    feature_layers None: EAGLE-3's usual choice, the outputs of layers 1, L/2 - 1 and L - 4 (the inputs of 2, L/2
    and L - 3). full_norms False: EAGLE without input_layernorm and final norm, as published.
    """
    count = target.num_layers
    if feature_layers is None:
        feature_layers = (min(1, count - 1), max(0, count // 2 - 1), max(0, count - 4))
    return HeadConfig(
        kind=kind,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size or target.vocab_size,
        num_layers=num_layers,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        rope=target.rope,
        feature_layers=feature_layers if kind is HeadKind.EAGLE3 else (),
        norms_attention_input=full_norms,
        norms_output=full_norms or kind is not HeadKind.EAGLE,
        recycles_normed=kind is HeadKind.MTP,
    )
