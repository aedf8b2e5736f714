"""Finds out where the host would wait for a device, on a machine that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that give a value to the host; in inference mode the outer ones are seen, else the inner one.
_VALUE = {"_local_scalar_dense", "allclose", "equal", "is_nonzero", "item"}
# Operations whose result's size the host has to know.
_SIZE = {
    "_unique2",
    "argwhere",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}
_READING_METHODS = ("tolist", "numpy", "cpu", "__array__")


class _Operations(TorchDispatchMode):
    """Notes operations that read; a mask as an index is one of them."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        if name in _VALUE:
            self._note("value")
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            if any(index is not None and index.dtype == torch.bool for index in args[1]):
                self._note("mask as index")
        elif (name in _SIZE and kwargs.get("output_size") is None) or (name == "where" and len(args) == 1):
            self._note(name)
        return func(*args, **kwargs)


@contextmanager
def host_reads(note: Callable[[str], None]) -> Iterator[None]:
    """Calls `note` with the name of whatever would wait for the device that holds the tensors.

    That is: reading a value or a size that depends on one, copies to the host, and copies to the device that are not
    staged (Tensor.to without non_blocking, torch.tensor with a device).
    """
    to, tensor = torch.Tensor.to, torch.tensor

    def reading(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            note(name)
            return method(self, *args, **kwargs)

        return call

    def moving(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        moves = "device" in kwargs or any(isinstance(arg, str | torch.device) for arg in args)
        if moves and not kwargs.get("non_blocking", False):
            note("to")
        return to(self, *args, **kwargs)

    def making(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            note("tensor")
        return tensor(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, _Operations(note):
        for name in _READING_METHODS:
            patch.setattr(torch.Tensor, name, reading(name, getattr(torch.Tensor, name)))
        patch.setattr(torch.Tensor, "to", moving)
        patch.setattr(torch, "tensor", making)
        yield
