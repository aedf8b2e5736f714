"""One C call per forward pass: a llama-shaped decoder over packed weights, and how a batch crosses into C."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu_worker.forward_batch import AttentionMetadata, ForwardBatch
from gpu_worker.kernels.kv_pool import NativeKVPool
from gpu_worker.kernels.linear import PackedLinear
from gpu_worker.kernels.native import (
    BatchStruct,
    KernelError,
    LayerStruct,
    ModelStruct,
    NativeKernels,
    RowsStruct,
    ThreadTeam,
    pointer,
)

_TABLES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PACKED_TABLE = 3


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder; intermediate columns are padded to 64 in gate_up (see interleaved_width)."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation_group: int = 32  # inputs that share one activation scale: 32, or 64 (which W8 needs)

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def interleaved_width(self) -> int:
        """Columns of gate_up: blocks of 16 of gate and up in turn, each padded to a multiple of 64."""
        return -(-self.intermediate_size // 64) * 128


@dataclass(frozen=True)
class DecoderLayerWeights:
    """Norms are float32; gate_up is packed with gate at column 0 and up at column 16, both with block_stride 2."""

    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    attn_norm: torch.Tensor | None  # [hidden]; None: attention reads the residual stream as it is
    mlp_norm: torch.Tensor  # [hidden]
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class Description:
    """What a model is created from in C, where only addresses are kept: hold on to this as long as to the model."""

    struct: ModelStruct
    kept_alive: tuple[Any, ...]


def describe(
    shape: DecoderShape,
    embedding: torch.Tensor | PackedLinear,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layers: Sequence[DecoderLayerWeights],
    final_norm: torch.Tensor | None,
) -> Description:
    """Addresses of all weights; sizes of the linears are checked in C. Raises KernelError naming what does not fit."""
    h, d = shape.hidden_size, shape.head_dim
    structs = (LayerStruct * len(layers))(
        *(
            LayerStruct(
                layer.qkv.handle.address,
                layer.o.handle.address,
                layer.gate_up.handle.address,
                layer.down.handle.address,
                norm_pointer("attn_norm", layer.attn_norm, h),
                norm_pointer("mlp_norm", layer.mlp_norm, h),
                norm_pointer("q_norm", layer.q_norm, d),
                norm_pointer("k_norm", layer.k_norm, d),
            )
            for layer in layers
        )
    )
    if isinstance(embedding, PackedLinear):
        vocab, table, address = embedding.out_features, _PACKED_TABLE, embedding.handle.address
        if embedding.in_features != h:
            raise KernelError(f"embedding: rows of {embedding.in_features}, expected {h}")
    else:
        if embedding.dtype not in _TABLES:
            raise KernelError(f"embedding: {embedding.dtype}, expected one of {list(_TABLES)}")
        vocab, table = embedding.shape[0], _TABLES[embedding.dtype]
        address = pointer("embedding", embedding, embedding.dtype, (vocab, h))
    struct = ModelStruct(
        len(layers),
        h,
        shape.intermediate_size,
        shape.num_heads,
        shape.num_kv_heads,
        d,
        2 * cos.shape[1],
        cos.shape[0],
        vocab,
        shape.rms_norm_eps,
        d**-0.5,
        shape.activation_group,
        table,
        address,
        pointer("cos", cos, torch.float32, cos.shape),
        pointer("sin", sin, torch.float32, cos.shape),
        norm_pointer("final_norm", final_norm, h),
        structs,
    )
    return Description(struct, (structs, embedding, cos, sin, tuple(layers), final_norm))


class NativeDecoder:
    """Embedding, layers and final norm. Not for use by two threads at once."""

    def __init__(
        self,
        kernels: NativeKernels,
        shape: DecoderShape,
        embedding: torch.Tensor | PackedLinear,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layers: Sequence[DecoderLayerWeights],
        final_norm: torch.Tensor,
    ) -> None:
        """embedding [vocab, hidden] float32, bfloat16 or float16, or a packed linear (a tied head);
        cos and sin [positions, rotary_dim / 2] float32, halves of a head being rotated against each other.

        Raises KernelError naming what does not fit.
        """
        self.shape = shape
        self._kernels = kernels
        self._description = describe(shape, embedding, cos, sin, layers, final_norm)
        self.handle = kernels.create(
            "dl_model_create", ctypes.byref(self._description.struct), None, int(kernels.isa)
        )

    def forward(
        self, batch: ForwardBatch, pool: NativeKVPool, team: ThreadTeam, capture: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs all layers over the batch's T rows and writes their KV.

        Returns the hidden states [T, h] float32 after the final norm and, unless `capture` is empty, the residual
        stream after each of the layers that it names, side by side in its order: [T, len(capture) * h] float32. Layers
        count from 0; the last one's stream is what the final norm reads.

        Raises KernelError for a batch that names tokens, positions or slots that do not exist, or for such layers.
        """
        crossing = marshal(batch, pool)
        hidden = torch.empty(batch.num_rows, self.shape.hidden_size)
        layers = (ctypes.c_int32 * len(capture))(*capture)
        captured = torch.empty(batch.num_rows, len(capture) * self.shape.hidden_size) if capture else None
        rows = RowsStruct(
            None,
            0,
            len(capture),
            ctypes.addressof(layers),
            hidden.data_ptr(),
            None,
            None if captured is None else captured.data_ptr(),
        )
        self._kernels.call(
            "dl_model_forward",
            self.handle.address,
            team.handle.address,
            pool.handle.address,
            ctypes.byref(crossing.struct),
            ctypes.byref(rows),
        )
        return hidden, captured


@dataclass(frozen=True)
class MarshalledBatch:
    """A batch as C takes it, with the memory that it points to."""

    struct: BatchStruct
    kept_alive: tuple[Any, ...]


def marshal(batch: ForwardBatch, pool: NativeKVPool) -> MarshalledBatch:
    """Checks dtypes, lengths and the page size; C checks the values. Raises KernelError naming what does not fit."""
    metadata = batch.attention
    check_page_size(metadata.page_size, pool)
    num_rows, num_requests = batch.num_rows, metadata.num_requests
    arrays = [
        int32_array("qo_indptr", metadata.qo_indptr, num_requests + 1),
        int32_array("kv_lens", metadata.kv_lens, num_requests),
        int32_array("page_indptr", metadata.page_indptr, num_requests + 1),
        int32_array("page_indices", metadata.page_indices, len(metadata.page_indices)),
        *_ancestor_lists(metadata),
    ]
    if int(arrays[0][-1]) != num_rows or int(arrays[2][-1]) > len(arrays[3]):
        raise KernelError(
            f"qo_indptr and page_indptr: end at {arrays[0][-1]} and {arrays[2][-1]}, there are {num_rows} rows"
            f" and {len(arrays[3])} pages"
        )
    shape = (num_rows,)
    input_ids, positions = batch.input_ids.contiguous(), batch.positions.contiguous()
    out_slots = batch.out_slots.contiguous()
    struct = BatchStruct(
        num_requests,
        metadata.page_size,
        pointer("input_ids", input_ids, torch.int64, shape),
        pointer("positions", positions, torch.int64, shape),
        pointer("out_slots", out_slots, torch.int64, shape),
        *(address_of(array) for array in arrays),
    )  # fields that are left out are null: no trees
    return MarshalledBatch(struct, (*arrays, input_ids, positions, out_slots))


def address_of(array: np.ndarray) -> int:
    """Where the array's first element lies; its `ctypes` attribute gives the same, ten times slower."""
    address: int = array.__array_interface__["data"][0]
    return address


def check_page_size(page_size: int, pool: NativeKVPool) -> None:
    """Raises KernelError unless pages are the pool's."""
    if page_size != pool.page_size:
        raise KernelError(f"page_size: {page_size} in the batch, {pool.page_size} in the pool")


def norm_pointer(name: str, norm: torch.Tensor | None, size: int) -> int | None:
    """Address of a norm's float32 weights [size], None for no norm. Raises KernelError naming what differs."""
    return None if norm is None else pointer(name, norm, torch.float32, (size,))


def int32_array(name: str, array: np.ndarray, length: int) -> np.ndarray:
    """A contiguous int32 copy or the array itself. Raises KernelError unless its shape is (length,)."""
    if array.shape != (length,):
        raise KernelError(f"{name}: {list(array.shape)}, expected [{length}]")
    return np.ascontiguousarray(array, dtype=np.int32)


def _ancestor_lists(metadata: AttentionMetadata) -> list[np.ndarray]:
    """[] without trees; else tree_indptr [T + 1] and, per row of a tree, its ancestors and itself, ascending."""
    if all(mask is None for mask in metadata.tree_masks):
        return []
    counts = np.zeros(int(metadata.qo_indptr[-1]) + 1, dtype=np.int32)
    lists = []
    for b, mask in enumerate(metadata.tree_masks):
        if mask is None:
            continue
        begin, end = int(metadata.qo_indptr[b]), int(metadata.qo_indptr[b + 1])
        visible = mask.numpy()
        if visible.shape != (end - begin, end - begin):
            raise KernelError(f"tree_masks[{b}]: {list(visible.shape)}, expected {[end - begin] * 2}")
        counts[begin + 1 : end + 1] = visible.sum(axis=1)
        lists.append(np.nonzero(visible)[1])
    ancestors = np.concatenate(lists).astype(np.int32)
    return [np.cumsum(counts, dtype=np.int32), ancestors]
