"""Range checks of request fields; every failure names the field's path, the value and the limit."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from scheduler_svc.errors import InvalidFieldError


def in_range(field: str, value: float, low: float, high: float) -> float:
    """The value if low <= value <= high; NaN and infinities never are. Limits are rounded as the float32 fields are."""
    if not _float32(low) <= value <= _float32(high):
        raise InvalidFieldError(field, f"{_short(value)} is not in [{low:g}, {high:g}]")
    return value


def above(field: str, value: float, low: float, high: float) -> float:
    """The value if low < value <= high; otherwise as in_range."""
    if not _float32(low) < value <= _float32(high):
        raise InvalidFieldError(field, f"{_short(value)} is not in ({low:g}, {high:g}]")
    return value


def at_most(field: str, value: int, limit: int) -> int:
    """The count if it is within the limit."""
    if value > limit:
        raise InvalidFieldError(field, f"{value} is above {limit}")
    return value


def token_ids(field: str, ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """The ids if the model has all of them; the error names the first other one as `field[index]`."""
    checked = tuple(ids)
    if checked and max(checked) >= vocab_size:
        index = next(index for index, token_id in enumerate(checked) if token_id >= vocab_size)
        token_id(f"{field}[{index}]", checked[index], vocab_size)
    return checked


def token_id(field: str, value: int, vocab_size: int) -> int:
    """The id if the model has it."""
    if value >= vocab_size:
        raise InvalidFieldError(field, f"token id {value} is not in 0..{vocab_size - 1}")
    return value


def _float32(value: float) -> float:
    result: float = struct.unpack("f", struct.pack("f", value))[0]
    return result


def _short(value: float) -> str:
    """A float32 field as its sender wrote it: 1.1, not 1.10000002384."""
    return f"{value:.7g}"
