"""Under plan_layout.py and result_layout.py: what every record shares, and the walk over its bytes.

A record is a header, arrays of fixed-layout records, and two pools that hold everything of variable
length: one of int32, one of float32, in the order of the records that own them. No pickling: a worker in any
language can read it. `LAYOUT_VERSION` is compared in the handshake (control.py) and in every record.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

LAYOUT_VERSION = 2

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")

_NO_INTS: Int32Array = np.zeros(0, dtype=np.int32)
_NO_FLOATS: Float32Array = np.zeros(0, dtype=np.float32)

_Enum = TypeVar("_Enum", bound=IntEnum)


class LayoutError(ValueError):
    """Bytes that are not a record of this layout version."""


def concatenate_ints(parts: Sequence[Int32Array]) -> Int32Array:
    """One pool of the parts; empty for none."""
    return np.concatenate(parts, dtype=np.int32) if parts else _NO_INTS


def concatenate_floats(parts: Sequence[Float32Array]) -> Float32Array:
    """One pool of the parts; empty for none."""
    return np.concatenate(parts, dtype=np.float32) if parts else _NO_FLOATS


def enum_value(kind: type[_Enum], value: int) -> _Enum:
    """The member of that value. Raises LayoutError when there is none."""
    try:
        return kind(int(value))
    except ValueError as error:
        raise LayoutError(str(error)) from error


class RecordReader:
    """Walks one encoded record: header, record arrays, then the int and float pools.

    Arrays are views of a private copy of the bytes and read-only. Raises LayoutError whenever the bytes do
    not hold what the header and the records say they hold.
    """

    def __init__(self, data: bytes | memoryview, header: struct.Struct) -> None:
        self._data = bytes(data)
        self._offset = header.size
        if len(self._data) < header.size:
            raise LayoutError(f"record of {len(self._data)} bytes is shorter than its header ({header.size})")
        version, *self.header = header.unpack_from(self._data)
        if version != LAYOUT_VERSION:
            raise LayoutError(f"record has layout version {version}, this process speaks {LAYOUT_VERSION}")
        self._ints = _NO_INTS
        self._floats = _NO_FLOATS
        self._next_int = self._next_float = 0

    def take(self, record: struct.Struct, count: int) -> Iterator[tuple[Any, ...]]:
        """The next `count` records, field by field."""
        size = record.size * count
        start = self._advance(size)
        return record.iter_unpack(self._data[start : start + size])

    def take_pools(self, num_ints: int, num_floats: int) -> None:
        """The two pools, with which the record must end."""
        self._ints = self._take(_INT32, num_ints)
        self._floats = self._take(_FLOAT32, num_floats)
        if self._offset != len(self._data):
            raise LayoutError(
                f"record of {len(self._data)} bytes has {len(self._data) - self._offset} bytes too many"
            )

    def ints(self, count: int) -> Int32Array:
        """The next `count` numbers of the int pool."""
        start, self._next_int = self._next_int, self._end(self._next_int, count, len(self._ints), "int32")
        return self._ints[start : self._next_int]

    def floats(self, count: int) -> Float32Array:
        """The next `count` numbers of the float pool."""
        start, self._next_float = (
            self._next_float,
            self._end(self._next_float, count, len(self._floats), "float32"),
        )
        return self._floats[start : self._next_float]

    def finish(self) -> None:
        """Both pools must have been used up."""
        for name, used, size in (
            ("int32", self._next_int, len(self._ints)),
            ("float32", self._next_float, len(self._floats)),
        ):
            if used != size:
                raise LayoutError(f"{name} pool holds {size} numbers, its records own {used}")

    def _take(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        return np.frombuffer(
            self._data, dtype=dtype, count=count, offset=self._advance(dtype.itemsize * count)
        )

    def _advance(self, size: int) -> int:
        """Where the next `size` bytes begin."""
        start = self._offset
        if start + size > len(self._data):
            raise LayoutError(f"record of {len(self._data)} bytes ends before offset {start + size}")
        self._offset = start + size
        return start

    @staticmethod
    def _end(start: int, count: int, size: int, name: str) -> int:
        end = start + int(count)
        if not start <= end <= size:
            raise LayoutError(f"record owns {int(count)} numbers from {start} on of a {name} pool of {size}")
        return end
