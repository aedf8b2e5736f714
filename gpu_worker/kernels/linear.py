"""Weights packed for the CPU kernels, with the products that use them alone (layers run inside decoder.py)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from gpu_worker.kernels.native import Handle, KernelError, NativeKernels, ThreadTeam, pointer

_PACK_ROWS = 4096  # float rows converted at a time


class WeightFormat(IntEnum):
    """How weights are held; cpu/formats.hpp has the layouts."""

    W8 = 0  # int8, one scale per output channel; activations in groups of 64
    Q4_0 = 1  # as a GGUF's blocks of 32
    Q4_1 = 2
    Q8_0 = 3
    BF16 = 4


class BlockKind(IntEnum):
    """GGUF block types that are packed as they are, without a float in between."""

    Q4_0 = 1
    Q4_1 = 2
    Q8_0 = 3


_FLOAT_SOURCE = 0
_BLOCK_BYTES = {BlockKind.Q4_0: 18, BlockKind.Q4_1: 20, BlockKind.Q8_0: 34}
_BLOCK = 32
_FROM_FLOATS = (WeightFormat.W8, WeightFormat.Q8_0, WeightFormat.BF16)


class PackedLinear:
    """y = x @ weight.T + bias over packed weights [out_features, in_features]; all zero until packed."""

    def __init__(
        self,
        kernels: NativeKernels,
        format: WeightFormat,
        out_features: int,
        in_features: int,
        *,
        handle: Handle | None = None,
    ) -> None:
        self.kernels = kernels
        self.format = format
        self.out_features = out_features
        self.in_features = in_features
        self.handle = handle or kernels.create("dl_linear_create", int(format), out_features, in_features)

    @property
    def num_bytes(self) -> int:
        return self.kernels.number("dl_linear_bytes", self.handle.address)

    def pack_floats(self, weight: torch.Tensor, first_column: int = 0, block_stride: int = 1) -> None:
        """Quantises rows of any float dtype, [rows, in_features], into this linear's output columns.

        Row j becomes column first_column + (j // 16) * 16 * block_stride + j % 16: stride 2 interleaves gate and
        up. Raises KernelError for a 4-bit format, which is only packed from a file's blocks.
        """
        if self.format not in _FROM_FLOATS:
            raise KernelError(f"format: {self.format.name} cannot be packed from floats")
        for begin in range(0, weight.shape[0], _PACK_ROWS):
            rows = weight[begin : begin + _PACK_ROWS].to(torch.float32).contiguous()
            address = pointer("weight", rows, torch.float32, (len(rows), self.in_features))
            column = first_column + begin * block_stride
            self._pack(_FLOAT_SOURCE, address, len(rows), self.in_features * 4, column, block_stride)

    def pack_blocks(
        self, kind: BlockKind, blocks: torch.Tensor, first_column: int = 0, block_stride: int = 1
    ) -> None:
        """Re-lays the rows of a GGUF tensor, [rows, bytes per row] uint8; columns as in pack_floats."""
        row_bytes = self.in_features // _BLOCK * _BLOCK_BYTES[kind]
        address = pointer("blocks", blocks, torch.uint8, (blocks.shape[0], row_bytes))
        self._pack(int(kind), address, blocks.shape[0], row_bytes, first_column, block_stride)

    def set_bias(self, bias: torch.Tensor) -> None:
        """bias [out_features] in any float dtype, in the order of the columns."""
        bias = bias.to(torch.float32).contiguous()
        address = pointer("bias", bias, torch.float32, (self.out_features,))
        self.kernels.call("dl_linear_set_bias", self.handle.address, address)

    def select(self, columns: Sequence[int] | torch.Tensor) -> PackedLinear:
        """A new linear of these output columns, bit for bit the same weights: a reduced vocabulary."""
        ids = torch.as_tensor(columns, dtype=torch.int64).contiguous()
        handle = self.kernels.create("dl_linear_select", self.handle.address, ids.data_ptr(), ids.numel())
        return PackedLinear(self.kernels, self.format, ids.numel(), self.in_features, handle=handle)

    def dequantise(self, columns: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """The weights of these columns as stored, [n, in_features] float32."""
        ids = torch.as_tensor(columns, dtype=torch.int64).contiguous()
        out = torch.empty(ids.numel(), self.in_features)
        self.kernels.call(
            "dl_linear_dequantise", self.handle.address, ids.data_ptr(), ids.numel(), out.data_ptr()
        )
        return out

    def run(self, team: ThreadTeam, x: torch.Tensor, activation_group: int = 64) -> torch.Tensor:
        """x [M, in_features] float32 -> [M, out_features] float32. No row depends on the others."""
        address = pointer("x", x, torch.float32, (x.shape[0], self.in_features))
        out = torch.empty(x.shape[0], self.out_features)
        self._product("dl_linear_run", team, address, len(x), activation_group, out.data_ptr())
        return out

    def argmax(self, team: ThreadTeam, x: torch.Tensor, activation_group: int = 64) -> torch.Tensor:
        """Column of each row's largest output (ties: the lowest), [M] int64, without writing the outputs."""
        address = pointer("x", x, torch.float32, (x.shape[0], self.in_features))
        ids = torch.empty(x.shape[0], dtype=torch.int64)
        self._product("dl_linear_argmax", team, address, len(x), activation_group, ids.data_ptr())
        return ids

    def topk(
        self, team: ThreadTeam, x: torch.Tensor, k: int, activation_group: int = 64
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(columns [M, k] int64, outputs [M, k], log-sum-exp of all outputs [M]), best first, ties by column."""
        address = pointer("x", x, torch.float32, (x.shape[0], self.in_features))
        ids = torch.empty(x.shape[0], k, dtype=torch.int64)
        values, lse = torch.empty(x.shape[0], k), torch.empty(x.shape[0])
        self._product(
            "dl_linear_topk",
            team,
            address,
            len(x),
            activation_group,
            k,
            ids.data_ptr(),
            values.data_ptr(),
            lse.data_ptr(),
        )
        return ids, values, lse

    def _pack(self, source: int, address: int, rows: int, row_bytes: int, column: int, stride: int) -> None:
        self.kernels.call(
            "dl_linear_pack", self.handle.address, source, address, rows, row_bytes, column, stride
        )

    def _product(self, name: str, team: ThreadTeam, x: int, rows: int, group: int, *out: int) -> None:
        isa = int(self.kernels.isa)
        self.kernels.call(name, self.handle.address, team.handle.address, isa, group, x, rows, *out)
