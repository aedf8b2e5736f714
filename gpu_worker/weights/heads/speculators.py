"""The speculators format (`speculators_model_type` in config.json): EAGLE-3 and EAGLE-1 with the decoder apart."""

from __future__ import annotations

import torch

from gpu_worker.config import LayerIdsName
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.heads.config import HeadConfig
from gpu_worker.weights.heads.eagle import read_eagle
from gpu_worker.weights.heads.eagle3 import read_eagle3
from gpu_worker.weights.heads.files import HeadFiles
from gpu_worker.weights.heads.mapping import decoder_settings

_TYPE = "speculators_model_type"
_LAYER = "transformer_layer_config"


def matches(files: HeadFiles, target: ModelConfig) -> bool:
    """Whether config.json says so."""
    return _TYPE in files.config


def read(
    files: HeadFiles, target: ModelConfig, layer_ids_name: LayerIdsName = "inputs"
) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """The head of a speculators checkpoint. Raises ModelError, also for kinds and flags that it cannot compute."""
    kind, layer = files.config[_TYPE], files.config.get(_LAYER)
    if kind not in ("eagle3", "eagle"):
        raise files.error(f"{_TYPE} is {kind!r}, supported are 'eagle3' and 'eagle'")
    if not isinstance(layer, dict):
        raise files.error(f"{_LAYER} is {layer!r}, expected an object")
    layer = {"num_hidden_layers": 1, **layer}
    if kind == "eagle3":
        return read_eagle3(files, target, layer, layer_ids_name)
    if files.config.get("layernorms"):
        raise files.error("layernorms is true, a norm of the embedding alone is not supported")
    settings = decoder_settings(files, {**layer, "num_hidden_layers": 1}, target)
    return read_eagle(
        files, target, settings, "fusion_fc", {0: "transformer."}, files.config.get("fusion_bias")
    )
