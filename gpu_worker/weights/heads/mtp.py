"""Multi-token-prediction modules inside a target's own checkpoint: DeepSeek-V3's names, Qwen3-Next's and MiMo's.

Only the first module is read; drafts further ahead use it again on its own output. Its layer has to be a plain decoder
layer: latent attention, experts and norms of queries are errors that name the tensor.
"""

from __future__ import annotations

import re

import torch

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
)

_DEEPSEEK = re.compile(r"model\.layers\.(?P<layer>\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)\.weight$")
_QWEN = "mtp."
_MIMO = "model.mtp_layers.0."
_EMBEDDING = "model.embed_tokens.weight"
# these families store w where others store 1 + w
_ZERO_CENTRED_NORMS = ("qwen3_next", "qwen3_5")


def matches(files: HeadFiles, target: ModelConfig) -> bool:
    """Whether one of the three families' modules is there."""
    return any(name.startswith((_QWEN, _MIMO)) or _DEEPSEEK.match(name) for name in files.names)


def read(files: HeadFiles, target: ModelConfig) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """The first MTP module. Raises ModelError."""
    if any(name.startswith(_MIMO) for name in files.names):
        names = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
        return _read(files, target, _MIMO, _MIMO, names, embedding_first=False, recycles_normed=True)
    if any(name.startswith(_QWEN) for name in files.names):
        names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        return _read(
            files, target, "mtp.", "mtp.layers.0.", names, embedding_first=True, recycles_normed=True
        )
    # DeepSeek-V3 and GLM-4.5: layers behind the model's own
    first = min(int(match["layer"]) for name in files.names if (match := _DEEPSEEK.match(name)))
    prefix = f"model.layers.{first}."
    names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    return _read(files, target, prefix, prefix, names, embedding_first=True, recycles_normed=False)


def _read(
    files: HeadFiles,
    target: ModelConfig,
    prefix: str,
    layer_prefix: str,
    names: tuple[str, str, str, str],
    *,
    embedding_first: bool,
    recycles_normed: bool,
) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """names: combining layer, norm of the embedding, norm of the hidden state, final norm, all behind `prefix`."""
    combine, embedding_norm, feature_norm, final_norm = names
    # a module further ahead (mtp.layers.1.*) is not this one's
    scope = {
        name for name in files.names if name.startswith(prefix) and not re.match(r"mtp\.layers\.[1-9]", name)
    }
    _refuse_latent_attention(files, layer_prefix)
    settings = decoder_settings(files, files.config, target) | {"num_layers": 1}
    ready, ignored = dict[str, torch.Tensor](), set[str]()
    own_head = f"{prefix}shared_head.head.weight"
    if own_head in scope:
        ignored.add(own_head)
        rows = read_rows(files, own_head, target)
        if not _is_targets(files, target, rows):
            ready[LM_HEAD] = rows
    ignored |= _shared_embedding(files, target, f"{prefix}embed_tokens.weight")
    config = HeadConfig(
        kind=HeadKind.MTP,
        draft_vocab_size=target.vocab_size,
        embedding_first=embedding_first,
        combine_bias=f"{prefix}{combine}.bias" in files.names,
        qkv_bias=has_qkv_bias(files, layer_prefix),
        recycles_normed=recycles_normed,
        own_lm_head=LM_HEAD in ready,
        **settings,
    )
    config.check_fits(target, str(files.config_path))
    sources = layer_sources(1, {0: layer_prefix})
    sources |= {
        "combine.weight": f"{prefix}{combine}.weight",
        "combine.bias": f"{prefix}{combine}.bias",
        "embedding_norm.weight": f"{prefix}{embedding_norm}.weight",
        "feature_norm.weight": f"{prefix}{feature_norm}.weight",
        "norm.weight": f"{prefix}{final_norm}.weight",
    }
    tensors = read_mapped(files, config, sources, ready, ignored, scope)
    if str(files.config.get("model_type", "")).startswith(_ZERO_CENTRED_NORMS):
        tensors |= {name: 1 + tensor for name, tensor in tensors.items() if name.endswith("norm.weight")}
    return config, tensors


def _refuse_latent_attention(files: HeadFiles, prefix: str) -> None:
    """Its settings would fail first, with a message about head sizes."""
    for part in ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj"):
        if (name := f"{prefix}self_attn.{part}.weight") in files.names:
            raise ModelError(
                f"{files.where(name)}: tensor {name} cannot be used: multi-head latent attention is not supported"
            )


def _is_targets(files: HeadFiles, target: ModelConfig, rows: torch.Tensor) -> bool:
    """Whether the module's output rows are the model's own in the same files, as its authors share them."""
    name = LM_HEAD if LM_HEAD in files.names else _EMBEDDING
    if name not in files.names or (name == _EMBEDDING and not target.tie_word_embeddings):
        return False
    return torch.equal(read_rows(files, name, target), rows)


def _shared_embedding(files: HeadFiles, target: ModelConfig, name: str) -> set[str]:
    """The module's copy of the embedding. Raises ModelError where it is not the model's, which is the one used."""
    found = check_embedding(files, name, target)
    if found and _EMBEDDING in files.names:
        mine, models = read_rows(files, name, target), read_rows(files, _EMBEDDING, target)
        if not torch.equal(mine, models):
            raise ModelError(
                f"{files.where(name)}: tensor {name} differs from {_EMBEDDING}, heads share the target's embedding"
            )
    return found
