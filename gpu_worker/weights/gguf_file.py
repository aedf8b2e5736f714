"""Reads a GGUF file's header and maps its tensors; knows the format, not what the model is.

The gguf package's own reader makes several numpy arrays for every string of the vocabulary (seconds for
49,152 tokens) and fails on a file cut short with an error that names neither file nor tensor; so the header
is read here and the package does what is laborious: block layouts and dequantisation. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from gpu_worker.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS = {  # value type -> struct format
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_CHUNK_ELEMENTS = 1 << 14  # per row given to dequantize, which works on 16 rows at a time: fits the cache


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies; shape is [out, in] (the file lists it the other way round)."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """Metadata and tensors of one file.

    Raises ModelError, naming the file, when it cannot be read, is not a GGUF file, or is shorter than its
    header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read as a GGUF file: {error}") from error
        self.metadata: dict[str, Any] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        try:
            header = _HeaderReader(self._data.data, path)
            num_tensors, num_values = header.start()
            for _ in range(num_values):
                key = header.string()
                begin = header.position
                self.metadata[key] = header.value(header.scalar("<I"))
                self._spans[key] = (begin, header.position)
            self.tensors = self._tensor_table(header, num_tensors)
        except (struct.error, OverflowError) as error:
            raise ModelError(
                f"{path}: the file is cut short: its {len(self._data)} bytes end inside the header"
            ) from error
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: the GGUF header holds a string that is not UTF-8: {error}") from error

    def raw_metadata(self, key: str) -> bytes:
        """The bytes of one value, for fingerprints; b"" when the key is missing."""
        begin, end = self._spans.get(key, (0, 0))
        return self._data[begin:end].tobytes()

    def dequantized(self, name: str) -> npt.NDArray[np.floating[Any]]:
        """The tensor in its shape, float32 (F16 stays float16), writable; KeyError for an unknown name."""
        tensor = self.tensors[name]
        raw = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        if tensor.kind == GGMLQuantizationType.F32:
            return np.array(raw).view(np.float32).reshape(tensor.shape)
        if tensor.kind == GGMLQuantizationType.F16:
            return np.array(raw).view(np.float16).reshape(tensor.shape)
        # Blocks do not know rows: regrouping them spares the package's loop over 16 of the tensor's own short
        # rows.
        block_elements, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        num_blocks = tensor.num_bytes // block_bytes
        blocks_per_row = math.gcd(num_blocks, _CHUNK_ELEMENTS // block_elements)
        return dequantize(raw.reshape(-1, blocks_per_row * block_bytes), tensor.kind).reshape(tensor.shape)

    def blocks(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, [rows, bytes per row], writable; KeyError for an unknown name."""
        tensor = self.tensors[name]
        raw = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        return np.array(raw).reshape(tensor.shape[0], -1)

    def _tensor_table(self, header: _HeaderReader, count: int) -> dict[str, GGUFTensor]:
        infos = []
        for _ in range(count):
            name = header.string()
            shape = tuple(header.scalar("<Q") for _ in range(header.scalar("<I")))[::-1]
            infos.append((name, shape, header.scalar("<I"), header.scalar("<Q")))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        data_start = -(-header.position // alignment) * alignment
        tensors = {}
        for name, shape, kind_number, offset in infos:
            try:
                kind = GGMLQuantizationType(kind_number)
                block_elements, block_bytes = GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError) as error:
                raise ModelError(f"{self.path}: tensor {name} has the unknown type {kind_number}") from error
            elements = math.prod(shape)
            if elements % block_elements:
                raise ModelError(
                    f"{self.path}: tensor {name} has {elements} elements, not a multiple of {kind.name}'s"
                    f" block of {block_elements}"
                )
            tensor = GGUFTensor(shape, kind, data_start + offset, elements // block_elements * block_bytes)
            if tensor.offset + tensor.num_bytes > len(self._data):
                raise ModelError(
                    f"{self.path}: the file is cut short: tensor {name} ends at byte"
                    f" {tensor.offset + tensor.num_bytes}, the file has {len(self._data)}"
                )
            tensors[name] = tensor
        return tensors


class _HeaderReader:
    """A cursor over the header's bytes; struct.error where they end too early."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self._data = data
        self._path = path
        self.position = 0

    def start(self) -> tuple[int, int]:
        """Checks magic and version; the numbers of tensors and of metadata values."""
        magic = bytes(self._data[:4])
        if magic != _MAGIC:
            raise ModelError(f"{self._path}: not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
        self.position = 4
        version = self.scalar("<I")
        if version not in _VERSIONS:
            raise ModelError(f"{self._path}: GGUF version {version}, supported are 2 and 3 (little endian)")
        return self.scalar("<Q"), self.scalar("<Q")

    def scalar(self, format: str) -> Any:
        (value,) = struct.unpack_from(format, self._data, self.position)
        self.position += struct.calcsize(format)
        return value

    def string(self) -> str:
        begin = self.position + 8
        end = begin + self.scalar("<Q")
        if end > len(self._data):
            raise struct.error("string beyond the end")
        self.position = end
        return str(self._data[begin:end], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise ModelError(f"{self._path}: metadata value of the unknown type {kind}")
        item_kind, count = self.scalar("<I"), self.scalar("<Q")
        if item_kind in _SCALARS:
            format = f"<{count}{_SCALARS[item_kind][1]}"
            values = list(struct.unpack_from(format, self._data, self.position))
            self.position += struct.calcsize(format)
            return values
        if count > len(self._data) - self.position:  # every item takes bytes: no loop over a damaged count
            raise struct.error("array beyond the end")
        return [self.value(item_kind) for _ in range(count)]
