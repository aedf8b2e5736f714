"""What all layouts share: the decoder layer's settings, renaming with every shape checked, and vocabularies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from gpu_worker.errors import ModelError
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.heads.config import HeadConfig
from gpu_worker.models.heads.tensors import DRAFT_IDS, tensor_shapes
from gpu_worker.models.hf_config import parse_hf_config
from gpu_worker.weights.heads.files import HeadFiles

LM_HEAD = "lm_head.weight"
_QKV_BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
# why tensors with these parts cannot be computed, for messages that say more than their name
_REASONS = {
    "kv_a_proj_with_mqa": "multi-head latent attention is not supported",
    "q_a_proj": "multi-head latent attention is not supported",
    "mlp.experts": "mixtures of experts are not supported",
    "mlp.gate.": "mixtures of experts are not supported",
    "q_norm": "norms of queries and keys are not supported in heads",
    "k_norm": "norms of queries and keys are not supported in heads",
    "fc_norm": "norms in front of fc (fc_norm) are not supported",
    "input_norm": "a norm in front of fc (norm_before_fc) is not supported",
}


def decoder_settings(files: HeadFiles, table: Mapping[str, Any], target: ModelConfig) -> dict[str, Any]:
    """Fields of HeadConfig that describe decoder layers, from the hub's names in `table` (config.json or a part).

    What does not depend on the head (vocabulary, context) defaults to the target's. Raises ModelError naming the key
    for settings that this code does not compute, another hidden size or another vocabulary, and without config.json.
    """
    files.need_config()
    settings = {
        "vocab_size": target.num_embeddings,
        "max_position_embeddings": target.max_position_embeddings,
        **{key: value for key, value in table.items() if value is not None and key != "eos_token_id"},
        "architectures": ["LlamaForCausalLM"],  # the layer's shape; biases are told by the tensors
    }
    parsed = parse_hf_config(settings, {}, files.config_path)
    check_hidden_size(files, table, target)
    check_vocab_size(files, settings, target)
    return {
        "hidden_size": parsed.hidden_size,
        "vocab_size": target.vocab_size,
        "num_layers": parsed.num_layers,
        "intermediate_size": parsed.intermediate_size,
        "num_heads": parsed.num_heads,
        "num_kv_heads": parsed.num_kv_heads,
        "head_dim": parsed.head_dim,
        "rms_norm_eps": parsed.rms_norm_eps,
        "max_position_embeddings": min(parsed.max_position_embeddings, target.max_position_embeddings),
        "rope": parsed.rope,
        "attends_first_slot": False,  # published heads never saw the pair (t_0, zeros)
    }


def check_hidden_size(files: HeadFiles, table: Mapping[str, Any], target: ModelConfig) -> None:
    """Raises ModelError where config.json was made for another hidden size."""
    for key in ("hidden_size", "target_hidden_size"):
        if table.get(key) not in (None, target.hidden_size):
            raise files.error(f"{key} is {table[key]}, the target's hidden_size is {target.hidden_size}")


def check_vocab_size(files: HeadFiles, table: Mapping[str, Any], target: ModelConfig) -> None:
    """Raises ModelError where config.json was made for another vocabulary (padding rows may count or not)."""
    if table.get("vocab_size") not in (None, target.vocab_size, target.num_embeddings):
        raise files.error(f"vocab_size is {table['vocab_size']}, the target's is {target.vocab_size}")


def layer_sources(num_layers: int, prefixes: Mapping[int, str]) -> dict[str, str]:
    """Canonical name -> name in the file for all that a layer may have; prefixes[i] stands in front of layer i's."""
    parts = ["input_layernorm.weight", "post_attention_layernorm.weight", *_QKV_BIASES]
    parts += [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    parts += [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    return {f"layers.{i}.{part}": f"{prefixes[i]}{part}" for i in range(num_layers) for part in parts}


def has_qkv_bias(files: HeadFiles, prefix: str) -> bool:
    """Whether the layer behind `prefix` ships biases: configs of heads often do not say."""
    return any(f"{prefix}{part}" in files.names for part in _QKV_BIASES)


def read_mapped(
    files: HeadFiles,
    config: HeadConfig,
    sources: Mapping[str, str],
    ready: Mapping[str, torch.Tensor],
    ignored: Iterable[str] = (),
    scope: Iterable[str] | None = None,
) -> dict[str, torch.Tensor]:
    """All tensors of `config` by canonical name: those of `ready`, the others by their names in `sources`.

    Raises ModelError when one is missing or has another shape, and when a tensor in `scope` (default: all) has no
    place and is not `ignored`: leaving out a norm or a bias would draft something else, silently.
    """
    tensors, used = dict[str, torch.Tensor](), set[str](ignored)
    for name, shape in tensor_shapes(config).items():
        if name in ready:
            assert tuple(ready[name].shape) == shape, (
                f"{name}: prepared in the shape that the configuration says"
            )
            tensors[name] = ready[name]
        else:
            tensors[name] = files.read(sources[name], shape)
            used.add(sources[name])
    for name in sorted(files.names if scope is None else scope):
        if name not in used and not name.endswith("rotary_emb.inv_freq"):
            reason = next(
                (text for part, text in _REASONS.items() if part in name), "it has no place in this layout"
            )
            raise ModelError(f"{files.where(name)}: tensor {name} cannot be used: {reason}")
    return tensors


def read_rows(files: HeadFiles, name: str, target: ModelConfig) -> torch.Tensor:
    """A head over the target's whole vocabulary, cut to the ids in use: [vocab_size, h]. Raises ModelError."""
    found = files.shape(name)
    rows = found[0] if found and found[0] in (target.vocab_size, target.num_embeddings) else target.vocab_size
    return files.read(name, (rows, target.hidden_size))[: target.vocab_size]


def check_embedding(files: HeadFiles, name: str, target: ModelConfig) -> set[str]:
    """A head's copy of the target's embedding, to be ignored. Raises ModelError when its shape is another.

    Heads share the frozen embedding of their target, so the copy is the target's.
    """
    if name not in files.names:
        return set()
    found = files.shape(name)
    allowed = [(rows, target.hidden_size) for rows in {target.vocab_size, target.num_embeddings}]
    if found not in allowed:
        raise ModelError(
            f"{files.where(name)}: tensor {name} has shape {list(found)}, the target's embedding has {list(allowed[0])}"
        )
    return {name}


def reduced_vocabulary(
    where: Path, name: str, target_ids: torch.Tensor, target: ModelConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Which of the draft ids with these `target_ids` [d] to keep, in order [k], and DRAFT_IDS where k is not all.

    Ids of the target's padding are dropped, since nothing can draw them; all ids in any order are the whole
    vocabulary. Tensor `name` in file `where` is to blame: raises ModelError for repeated or unknown ids.
    """
    if len(target_ids) == 0 or int(target_ids.min()) < 0 or int(target_ids.max()) >= target.num_embeddings:
        found = [] if len(target_ids) == 0 else [int(target_ids.min()), int(target_ids.max())]
        raise ModelError(
            f"{where}: tensor {name} gives target ids within {found}, the target's are 0..{target.num_embeddings - 1}"
        )
    if len(set(target_ids.tolist())) != len(target_ids):
        raise ModelError(f"{where}: tensor {name} gives the same target id to several draft ids")
    keep = (target_ids < target.vocab_size).nonzero().flatten()
    if len(keep) == target.vocab_size:
        return keep[target_ids[keep].argsort()], {}
    return keep, {DRAFT_IDS: target_ids[keep].contiguous()}
