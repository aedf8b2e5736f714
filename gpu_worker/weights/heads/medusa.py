"""Medusa's heads: FasterDecoding's .pt ({i}.{j}.linear, {i}.{n}) and vLLM's form (blocks.{i}.layers.{j}, lm_heads.{i}).

Heads and blocks are counted by the tensors: published configs often name another number of heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from gpu_worker.errors import ModelError
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.heads.config import HeadConfig, HeadKind
from gpu_worker.weights.heads.files import HeadFiles
from gpu_worker.weights.heads.mapping import (
    LM_HEAD,
    check_hidden_size,
    check_vocab_size,
    read_mapped,
    read_rows,
    reduced_vocabulary,
)

_PREFIX = r"(?P<prefix>(?:model\.)?(?:medusa_heads?\.)?)"
_ORIGINAL = re.compile(_PREFIX + r"(?P<head>\d+)\.(?P<block>\d+)\.linear\.(?P<part>weight|bias)$")
_VLLM = re.compile(_PREFIX + r"blocks\.(?P<head>\d+)\.layers\.(?P<block>\d+)\.(?P<part>weight|bias)$")


def matches(files: HeadFiles, target: ModelConfig) -> bool:
    """Whether there are Medusa's residual blocks."""
    return any(_ORIGINAL.match(name) or _VLLM.match(name) for name in files.names)


def read(files: HeadFiles, target: ModelConfig) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """The heads of a Medusa checkpoint. Raises ModelError."""
    check_hidden_size(files, files.config, target)
    check_vocab_size(files, files.config, target)
    in_vllm_form = any(_VLLM.match(name) for name in files.names)
    pattern = _VLLM if in_vllm_form else _ORIGINAL
    found = [match for name in sorted(files.names) if (match := pattern.match(name))]
    prefix = found[0]["prefix"]
    num_heads = 1 + max(int(match["head"]) for match in found)
    num_blocks = 1 + max(int(match["block"]) for match in found)
    h = target.hidden_size
    ready, sources, used = dict[str, torch.Tensor](), dict[str, str](), set[str]()
    for k in range(num_heads):
        for i in range(num_blocks):
            name = f"{prefix}blocks.{k}.layers.{i}" if in_vllm_form else f"{prefix}{k}.{i}.linear"
            sources[f"medusa.{k}.blocks.{i}.weight"] = f"{name}.weight"
            sources[f"medusa.{k}.blocks.{i}.bias"] = f"{name}.bias"
            if in_vllm_form and f"{name}.bias" not in files.names:  # its blocks may have none
                dtype = files.read(f"{name}.weight", (h, h)).dtype
                ready[f"medusa.{k}.blocks.{i}.bias"] = torch.zeros(h, dtype=dtype)
    names = [
        f"{prefix}lm_heads.{k}.weight" if in_vllm_form else f"{prefix}{k}.{num_blocks}.weight"
        for k in range(num_heads)
    ]
    shared = in_vllm_form and bool(files.config.get("original_lm_head"))
    if shared:  # the file may hold copies of the target's
        used |= files.names & {LM_HEAD, f"{prefix}{LM_HEAD}", *names}
    draft_vocab_size, tensors = _vocabulary(files, target, f"{prefix}token_map", [] if shared else names)
    used |= files.names & {f"{prefix}token_map", *names}
    config = HeadConfig(
        kind=HeadKind.MEDUSA,
        hidden_size=h,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        num_medusa_heads=num_heads,
        num_medusa_layers=num_blocks,
        own_lm_head=not shared,
        attends_first_slot=False,
    )
    return config, read_mapped(files, config, sources, ready | tensors, used)


def _vocabulary(
    files: HeadFiles, target: ModelConfig, token_map: str, names: Iterable[str]
) -> tuple[int, dict[str, torch.Tensor]]:
    """draft_vocab_size, draft_ids where the vocabulary is reduced, and the output layers `names` of the heads."""
    if token_map not in files.names:
        said = files.config.get("truncated_vocab_size")
        if said not in (None, target.vocab_size, target.num_embeddings):
            raise ModelError(
                f"{files.path}: tensor {token_map} is in none of the weight files, truncated_vocab_size is {said}"
            )
        rows = {f"medusa.{k}.{LM_HEAD}": read_rows(files, name, target) for k, name in enumerate(names)}
        return target.vocab_size, rows
    ids = files.read_integers(token_map)
    keep, tensors = reduced_vocabulary(files.where(token_map), token_map, ids, target)
    for k, name in enumerate(names):
        if files.shape(name)[:1] == ids.shape:
            lm_head = files.read(name, (len(ids), target.hidden_size))[keep]
        else:  # not cut yet: rows of the whole vocabulary
            lm_head = read_rows(files, name, target)[ids[keep]]
        tensors[f"medusa.{k}.{LM_HEAD}"] = lm_head.contiguous()
    return len(keep), tensors
