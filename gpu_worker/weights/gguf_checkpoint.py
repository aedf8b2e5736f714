"""A GGUF file as a source of tensors under the hub's names, dequantised, in the hub's row order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

from gpu_worker.errors import ModelError
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.gguf_config import parse_gguf_config
from gpu_worker.weights.gguf_file import GGUFFile

_FLOAT_KINDS = ("F32", "F16", "BF16")
_UNUSED_TOKEN = 5  # tokenizer.ggml.token_type of the rows that pad the vocabulary


class GGUFCheckpoint:
    """Implements TensorSource."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError for a file that is no whole GGUF file or describes no known model."""
        self.file = GGUFFile(path)
        divisors: tuple[float, ...] = ()
        if "rope_freqs.weight" in self.file.tensors:
            divisors = tuple(self.file.dequantized("rope_freqs.weight").astype(float).tolist())
        shapes = {name: tensor.shape for name, tensor in self.file.tensors.items()}
        self.config: ModelConfig = parse_gguf_config(self.file.metadata, shapes, divisors, path)
        arch_name = self.file.metadata["general.architecture"]
        arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == arch_name)
        self._names = get_tensor_name_map(arch, self.config.num_layers)
        # The llama converter reorders q and k rows for its interleaved rotation; those of Qwen keep the hub's
        # order.
        self._permuted_heads: dict[str, int] = {}
        if arch == MODEL_ARCH.LLAMA:
            self._permuted_heads = {
                "self_attn.q_proj": self.config.num_heads,
                "self_attn.k_proj": self.config.num_kv_heads,
            }

    @property
    def num_known_tokens(self) -> int:
        """Token ids that the tokenizer in the file knows; the file's token list may be padded behind them."""
        return count_known_tokens(self.file)

    def has(self, name: str) -> bool:
        return self._gguf_name(name) in self.file.tensors

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See TensorSource.read; float32, or float16 where the file holds that."""
        gguf_name = self._gguf_name(name)
        tensor = self.file.tensors.get(gguf_name)
        if tensor is None:
            raise ModelError(f"{self.file.path}: tensor {gguf_name} ({name}) is missing")
        if tensor.shape != shape:
            raise ModelError(
                f"{self.file.path}: tensor {gguf_name} ({name}) has shape {list(tensor.shape)},"
                f" expected {list(shape)}"
            )
        try:
            values = self.file.dequantized(gguf_name)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.file.path}: tensor {gguf_name} has type {tensor.kind.name}, which is not supported"
            ) from error
        weight = torch.from_numpy(np.ascontiguousarray(values))
        for projection, num_heads in self._permuted_heads.items():
            if f".{projection}." in name:
                weight = _unpermuted(weight, num_heads)
        return weight

    def read_blocks(self, name: str, shape: tuple[int, ...]) -> tuple[str, torch.Tensor] | None:
        """A matrix as the file's quantised blocks: the type's name and [rows, bytes per row] uint8, hub row order.

        None for a tensor that is missing, of another shape, or not quantised.
        """
        tensor = self.file.tensors.get(self._gguf_name(name))
        if tensor is None or tensor.shape != shape or tensor.kind.name in _FLOAT_KINDS:
            return None
        blocks = torch.from_numpy(self.file.blocks(self._gguf_name(name)))
        for projection, num_heads in self._permuted_heads.items():
            if f".{projection}." in name:
                blocks = _unpermuted(blocks, num_heads)
        return tensor.kind.name, blocks

    def _gguf_name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        return f"{self._names.get_name(stem) or stem}.{suffix}"


def count_known_tokens(file: GGUFFile) -> int:
    """Length of the token list without the padding at its end; 0 when the file has no tokenizer."""
    count = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    kinds = file.metadata.get("tokenizer.ggml.token_type", ())
    while 0 < count <= len(kinds) and kinds[count - 1] == _UNUSED_TOKEN:
        count -= 1
    return count


def _unpermuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from pairs (0, D/2, 1, D/2 + 1, ...) back to halves (0, 1, ..., D/2, D/2 + 1, ...).

    weight [num_heads * D, ...]: a matrix or a bias.
    """
    pairs = weight.view(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
