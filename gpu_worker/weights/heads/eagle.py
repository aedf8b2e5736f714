"""EAGLE-1 and -2 as published (SafeAILab/EAGLE; speculators' `eagle`): fc, one layer, the target's own lm_head.

The two share their weights; what differs is the shape of the tree. The original has no input_layernorm in layer 0, no
final norm, feeds the target's normed hidden behind the embedding and recycles its own output as it is.
"""

from __future__ import annotations

import torch

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.heads.config import HeadConfig, HeadKind
from gpu_worker.weights.heads.files import HeadFiles
from gpu_worker.weights.heads.mapping import (
    check_embedding,
    decoder_settings,
    has_qkv_bias,
    layer_sources,
    read_mapped,
)


def matches(files: HeadFiles, target: ModelConfig) -> bool:
    """Whether there are fc and plain decoder layers, not all of them perhaps."""
    return "fc.weight" in files.names or any(name.startswith("layers.0.") for name in files.names)


def read(files: HeadFiles, target: ModelConfig) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """The head of an EAGLE-1/2 checkpoint. Raises ModelError."""
    settings = decoder_settings(files, files.config, target)
    prefixes = {i: f"layers.{i}." for i in range(settings["num_layers"])}
    return read_eagle(files, target, settings, "fc", prefixes, files.config.get("bias"))


def read_eagle(
    files: HeadFiles,
    target: ModelConfig,
    settings: dict[str, object],
    fc: str,
    prefixes: dict[int, str],
    says_bias: object,
) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """The head whose combining layer is called `fc` and whose layers have `prefixes`.

    says_bias: config.json's word on fc's bias, None where it has none; then the tensors decide. Raises ModelError.
    """
    bias = f"{fc}.bias" in files.names if says_bias is None else bool(says_bias)
    config = HeadConfig(
        kind=HeadKind.EAGLE,
        draft_vocab_size=target.vocab_size,
        combine_bias=bias,
        qkv_bias=has_qkv_bias(files, prefixes[0]),
        norms_attention_input=f"{prefixes[0]}input_layernorm.weight" in files.names,
        norms_output="norm.weight" in files.names,
        **settings,  # type: ignore[arg-type]
    )
    config.check_fits(target, str(files.config_path))
    sources = layer_sources(config.num_layers, prefixes)
    sources |= {
        "combine.weight": f"{fc}.weight",
        "combine.bias": f"{fc}.bias",
        "norm.weight": "norm.weight",
    }
    ignored = check_embedding(files, "embed_tokens.weight", target)
    return config, read_mapped(files, config, sources, {}, ignored)
