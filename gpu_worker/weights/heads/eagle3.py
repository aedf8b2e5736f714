"""EAGLE-3 as published (LlamaForCausalLMEagle3): three fused hidden states and a reduced draft vocabulary.

Which layers are fused: the original code names layers whose INPUTS it keeps (ids 2, L/2 and L-3), while our
feature_layers name OUTPUTS: output = id - 1. Some trainers write the ids of outputs into the same field, and the file
does not tell; `layer_ids_name` says which. One off costs acceptance, never correctness.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gpu_worker.config import LayerIdsName
from gpu_worker.errors import ModelError
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.heads.config import HeadConfig, HeadKind
from gpu_worker.weights.heads.files import HeadFiles
from gpu_worker.weights.heads.mapping import (
    LM_HEAD,
    check_embedding,
    decoder_settings,
    has_qkv_bias,
    layer_sources,
    read_mapped,
    read_rows,
    reduced_vocabulary,
)

_AUX_IDS = "eagle_aux_hidden_state_layer_ids"


def matches(files: HeadFiles, target: ModelConfig) -> bool:
    """Whether there is a `midlayer`, a norm of the hidden state or a map of draft ids, which only EAGLE-3 has."""
    return any(
        name.startswith("midlayer.") or name in ("layers.0.hidden_norm.weight", "d2t") for name in files.names
    )


def read(
    files: HeadFiles, target: ModelConfig, layer_ids_name: LayerIdsName = "inputs"
) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """The head of an EAGLE-3 checkpoint. Raises ModelError."""
    return read_eagle3(files, target, files.config, layer_ids_name)


def read_eagle3(
    files: HeadFiles,
    target: ModelConfig,
    layer_table: Mapping[str, Any],
    layer_ids_name: LayerIdsName,
) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """`read` with the decoder's settings in `layer_table`; the flags of the speculators format count in both."""
    table = files.config
    extra = table.get("eagle_config") or {}
    for flag in ("norm_before_fc", "fc_norm"):
        if table.get(flag) or extra.get(flag):
            raise files.error(f"{flag} is true, norms in front of fc are not supported")
    if extra.get("use_aux_hidden_state") is False:
        raise files.error(
            "eagle_config.use_aux_hidden_state is false, only fused hidden states are supported"
        )
    if table.get("target_hidden_size") not in (None, target.hidden_size):
        raise files.error(
            f"target_hidden_size is {table['target_hidden_size']}, the target's hidden_size is {target.hidden_size}"
        )
    settings = decoder_settings(files, layer_table, target)
    prefixes = {i: f"layers.{i}." for i in range(settings["num_layers"])}
    if any(name.startswith("midlayer.") for name in files.names):
        prefixes[0] = "midlayer."
    draft_vocab_size, ready, ignored = _vocabulary(files, target)
    config = HeadConfig(
        kind=HeadKind.EAGLE3,
        draft_vocab_size=draft_vocab_size,
        feature_layers=_feature_layers(files, target, layer_ids_name),
        qkv_bias=has_qkv_bias(files, prefixes[0]),
        residual_is_normed=bool(table.get("norm_before_residual", False)),
        recycles_normed=bool(table.get("norm_output", False)),
        own_lm_head=LM_HEAD in ready,
        **settings,
    )
    config.check_fits(target, str(files.config_path))
    sources = layer_sources(config.num_layers, prefixes)
    sources |= {
        "fuse.weight": "fc.weight",
        "embedding_norm.weight": f"{prefixes[0]}input_layernorm.weight",
        "feature_norm.weight": f"{prefixes[0]}hidden_norm.weight",
        "norm.weight": "norm.weight",
    }
    ignored |= check_embedding(files, "embed_tokens.weight", target)
    if "fc.bias" in files.names and not bool(files.read("fc.bias", (target.hidden_size,)).any()):
        ignored.add("fc.bias")  # the first speculators files carry one of zeros
    return config, read_mapped(files, config, sources, ready, ignored)


def _feature_layers(files: HeadFiles, target: ModelConfig, name: LayerIdsName) -> tuple[int, ...]:
    """0-based target layers whose outputs are fused, in the order of fc's columns."""
    extra = files.config.get("eagle_config") or {}
    count = target.num_layers
    ids = extra.get(_AUX_IDS, files.config.get(_AUX_IDS))
    if ids is None:
        ids, name = [2, count // 2, count - 3], "inputs"  # what the original code fuses
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
        raise files.error(f"{_AUX_IDS} is {ids!r}, expected a list of layer numbers")
    shift = 1 if name == "inputs" else 0
    for layer in ids:
        if not 0 <= layer - shift < count:
            allowed = f"{shift}..{count - 1 + shift}"
            raise files.error(f"{_AUX_IDS} has {layer}, the target's {name} of layers are {allowed}")
    return tuple(layer - shift for layer in ids)


def _vocabulary(files: HeadFiles, target: ModelConfig) -> tuple[int, dict[str, torch.Tensor], set[str]]:
    """draft_vocab_size, the tensors draft_ids and lm_head.weight where there are any, and names dealt with."""
    said = files.config.get("draft_vocab_size")
    dealt_with = {name for name in (LM_HEAD, "d2t", "t2d") if name in files.names}
    if "d2t" not in files.names:
        if said not in (None, target.vocab_size, target.num_embeddings):
            raise ModelError(
                f"{files.path}: tensor d2t is in none of the weight files, draft_vocab_size is {said}"
            )
        tensors = {LM_HEAD: read_rows(files, LM_HEAD, target)} if LM_HEAD in files.names else {}
        return target.vocab_size, tensors, dealt_with
    offsets = files.read_integers("d2t")
    where = files.where("d2t")
    if said not in (None, len(offsets)):
        raise ModelError(f"{where}: tensor d2t has {len(offsets)} ids, draft_vocab_size is {said}")
    target_ids = torch.arange(len(offsets)) + offsets
    lm_head = None
    if LM_HEAD in files.names or len(offsets) not in (target.vocab_size, target.num_embeddings):
        lm_head = files.read(LM_HEAD, (len(offsets), target.hidden_size))
    keep, tensors = reduced_vocabulary(where, "d2t", target_ids, target)
    if lm_head is not None:
        tensors[LM_HEAD] = lm_head[keep].contiguous()
    if "t2d" in files.names:
        _check_inverse(files, target_ids, target)
    return len(keep), tensors, dealt_with


def _check_inverse(files: HeadFiles, target_ids: torch.Tensor, target: ModelConfig) -> None:
    """Raises ModelError unless t2d marks exactly the ids that d2t reaches."""
    marks = files.read_integers("t2d") != 0
    where = files.where("t2d")
    if len(marks) not in (target.vocab_size, target.num_embeddings):
        raise ModelError(f"{where}: tensor t2d has {len(marks)} ids, the target has {target.vocab_size}")
    reached = target_ids[target_ids < len(marks)]
    if int(marks.sum()) != len(target_ids) or not bool(marks[reached].all()):
        raise ModelError(
            f"{where}: tensor t2d marks {int(marks.sum())} ids, which are not the {len(target_ids)} that d2t reaches"
        )
