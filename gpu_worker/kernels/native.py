"""Loads the compiled CPU kernels and calls them through ctypes: the only module that knows the C interface.

Everything above works with the typed classes of linear.py, kv_pool.py, decoder.py and draft_head.py, which check
shapes, dtypes and contiguity before a pointer leaves Python.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from gpu_worker.errors import WorkerError

_ABI_VERSION = 8
_LIBRARY = Path(__file__).parent / "cpu" / "libdraftline_cpu.so"


class KernelError(WorkerError):
    """A kernel was called with something it cannot take; the message names the argument, its value and the limit."""


class Isa(IntEnum):
    """Instruction sets that the kernels are compiled for, from slow to fast."""

    PORTABLE = 0
    AVX2 = 1
    AVX512_VNNI = 2
    AVX512_BF16 = 3


class LayerStruct(ctypes.Structure):
    """DlLayer."""

    _fields_ = [
        ("qkv", c_void_p),
        ("o", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("attn_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
    ]


class ModelStruct(ctypes.Structure):
    """DlModelDesc."""

    _fields_ = [
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("rotary_dim", c_int64),
        ("num_positions", c_int64),
        ("vocab", c_int64),
        ("eps", c_float),
        ("attn_scale", c_float),
        ("activation_group", c_int32),
        ("table", c_int32),
        ("embedding", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("final_norm", c_void_p),
        ("layers", ctypes.POINTER(LayerStruct)),
    ]


class DraftInputStruct(ctypes.Structure):
    """DlDraftInput."""

    _fields_ = [
        ("fuse", c_void_p),
        ("combine", c_void_p),
        ("embedding_norm", c_void_p),
        ("feature_norm", c_void_p),
        ("embedding_first", c_int32),
        ("residual_is_normed", c_int32),
        ("recycles_normed", c_int32),
    ]


class BatchStruct(ctypes.Structure):
    """DlBatch."""

    _fields_ = [
        ("num_requests", c_int64),
        ("page_size", c_int64),
        ("input_ids", c_void_p),
        ("positions", c_void_p),
        ("out_slots", c_void_p),
        ("qo_indptr", c_void_p),
        ("kv_lens", c_void_p),
        ("page_indptr", c_void_p),
        ("page_indices", c_void_p),
        ("tree_indptr", c_void_p),
        ("tree_ancestors", c_void_p),
    ]


class RowsStruct(ctypes.Structure):
    """DlRows."""

    _fields_ = [
        ("features", c_void_p),
        ("recycled", c_int32),
        ("num_captured", c_int32),
        ("captured_layers", c_void_p),
        ("hidden_out", c_void_p),
        ("residual_out", c_void_p),
        ("captured_out", c_void_p),
    ]


class TreeStruct(ctypes.Structure):
    """DlTree."""

    _fields_ = [
        ("num_sequences", c_int64),
        ("max_nodes", c_int64),
        ("page_size", c_int64),
        ("hidden", c_void_p),
        ("normed", c_void_p),
        ("lengths", c_void_p),
        ("page_indptr", c_void_p),
        ("page_indices", c_void_p),
        ("budgets", c_void_p),
        ("temperatures", c_void_p),
        ("seeds", c_void_p),
        ("max_depth", c_int32),
        ("max_children", c_int32),
        ("least_value", c_double),
        ("lm_head", c_void_p),
        ("target_ids", c_void_p),
    ]


class TreeOutStruct(ctypes.Structure):
    """DlTreeOut."""

    _fields_ = [("tokens", c_void_p), ("parents", c_void_p), ("values", c_void_p), ("counts", c_void_p)]


_HANDLE, _ARRAY, _STATUS = c_void_p, c_void_p, c_int32
_POINTER = ctypes.POINTER
_PRODUCT = (_HANDLE, _HANDLE, c_int32, c_int32, _ARRAY, c_int64)
_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "dl_abi_version": (c_int32, ()),
    "dl_last_error": (c_char_p, ()),
    "dl_best_isa": (c_int32, ()),
    "dl_isa_supported": (c_int32, (c_int32,)),
    "dl_team_create": (_HANDLE, (c_int32,)),
    "dl_team_destroy": (None, (_HANDLE,)),
    "dl_linear_create": (_HANDLE, (c_int32, c_int64, c_int64)),
    "dl_linear_destroy": (None, (_HANDLE,)),
    "dl_linear_bytes": (c_int64, (_HANDLE,)),
    "dl_linear_pack": (_STATUS, (_HANDLE, c_int32, _ARRAY, c_int64, c_int64, c_int64, c_int64)),
    "dl_linear_set_bias": (_STATUS, (_HANDLE, _ARRAY)),
    "dl_linear_select": (_HANDLE, (_HANDLE, _ARRAY, c_int64)),
    "dl_linear_dequantise": (_STATUS, (_HANDLE, _ARRAY, c_int64, _ARRAY)),
    "dl_linear_run": (_STATUS, (*_PRODUCT, _ARRAY)),
    "dl_linear_argmax": (_STATUS, (*_PRODUCT, _ARRAY)),
    "dl_linear_topk": (_STATUS, (*_PRODUCT, c_int32, _ARRAY, _ARRAY, _ARRAY)),
    "dl_linear_residual_blocks": (_STATUS, (*_PRODUCT, _ARRAY)),
    "dl_medusa_candidates": (
        _STATUS,
        (_HANDLE, *_PRODUCT, c_int32, c_int32, _ARRAY, _ARRAY, _ARRAY),
    ),
    "dl_gumbel_topk": (_STATUS, (_HANDLE, _ARRAY, _ARRAY, _ARRAY, c_int64, c_int64, c_int32, _ARRAY, _ARRAY)),
    "dl_pool_create": (_HANDLE, (c_int64, c_int64, c_int64, c_int64)),
    "dl_pool_destroy": (None, (_HANDLE,)),
    "dl_pool_move": (_STATUS, (_HANDLE, _ARRAY, _ARRAY, c_int64)),
    "dl_pool_write": (_STATUS, (_HANDLE, c_int64, _ARRAY, c_int64, _ARRAY, _ARRAY)),
    "dl_pool_read": (_STATUS, (_HANDLE, c_int64, _ARRAY, c_int64, _ARRAY, _ARRAY)),
    "dl_model_create": (_HANDLE, (_POINTER(ModelStruct), _POINTER(DraftInputStruct), c_int32)),
    "dl_model_destroy": (None, (_HANDLE,)),
    "dl_model_forward": (_STATUS, (_HANDLE, _HANDLE, _HANDLE, _POINTER(BatchStruct), _POINTER(RowsStruct))),
    "dl_model_tree": (
        _STATUS,
        (_HANDLE, _HANDLE, _HANDLE, _POINTER(TreeStruct), _POINTER(TreeOutStruct)),
    ),
}


class NativeKernels:
    """The loaded library. `isa` is the instruction set that models and heads built on it use."""

    def __init__(self, path: Path, isa: Isa | None = None) -> None:
        """Raises KernelError for a library that cannot be loaded, is of another version, or lacks `isa`."""
        try:
            self._library = ctypes.CDLL(str(path))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.restype = result
                function.argtypes = list(arguments)
        except (OSError, AttributeError) as error:
            raise KernelError(f"{path}: cannot be loaded: {error}") from error
        if (version := self._library.dl_abi_version()) != _ABI_VERSION:
            raise KernelError(
                f"{path}: has interface version {version}, expected {_ABI_VERSION}: build it again"
            )
        if isa is not None and not self._library.dl_isa_supported(int(isa)):
            raise KernelError(f"isa: {isa.name} is not compiled in or not supported by this processor")
        self.isa = Isa(self._library.dl_best_isa()) if isa is None else isa

    def supported_isas(self) -> list[Isa]:
        """Instruction sets of this library that this processor runs."""
        return [isa for isa in Isa if self._library.dl_isa_supported(int(isa))]

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function that returns a status. Raises KernelError with the library's message."""
        if getattr(self._library, name)(*arguments) != 0:
            raise KernelError(self._library.dl_last_error().decode())

    def create(self, name: str, *arguments: Any) -> Handle:
        """Calls dl_<name>_create or dl_linear_select; the handle owns the object. Raises KernelError."""
        address = getattr(self._library, name)(*arguments)
        if not address:
            raise KernelError(self._library.dl_last_error().decode())
        kind = name.split("_")[1]
        return Handle(address, getattr(self._library, f"dl_{kind}_destroy"))

    def number(self, name: str, *arguments: Any) -> int:
        """Calls a function that returns a number."""
        return int(getattr(self._library, name)(*arguments))


class Handle:
    """Owns one object of the library; freed with the last reference."""

    def __init__(self, address: int, destroy: Any) -> None:
        self.address = address
        self._destroy = destroy

    def __del__(self) -> None:
        self._destroy(self.address)


class ThreadTeam:
    """Threads that compute together; asleep between calls. One call at a time: the caller is one of them."""

    def __init__(self, kernels: NativeKernels, num_threads: int) -> None:
        self.kernels = kernels
        self.num_threads = num_threads
        self.handle = kernels.create("dl_team_create", num_threads)


@functools.cache
def load(isa: Isa | None = None) -> NativeKernels | None:
    """The installed library, or None where the installation had no compiler (the torch path serves then).

    Raises KernelError for a library that exists but does not load, or an instruction set it lacks.
    """
    return NativeKernels(_LIBRARY, isa) if _LIBRARY.exists() else None


def isa() -> str:
    """Name of the instruction set in use, "" without a library."""
    kernels = load()
    return "" if kernels is None else kernels.isa.name.lower()


def pointer(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Address of a contiguous CPU tensor of exactly this dtype and shape. Raises KernelError naming what differs."""
    if tensor.dtype is dtype and tensor.shape == shape and tensor.is_cpu and tensor.is_contiguous():
        return tensor.data_ptr()  # nearly always, several times a step
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise KernelError(f"{name}: {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}")
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise KernelError(
            f"{name}: on {tensor.device} with strides {tensor.stride()}, expected contiguous on cpu"
        )
    return tensor.data_ptr()
