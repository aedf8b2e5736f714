"""The paged KV memory of the native decoder: the same slots as gpu_worker/kv_pool.py, in the kernels' own layout."""

from __future__ import annotations

import torch

from gpu_worker.errors import DeviceError
from gpu_worker.kernels.native import KernelError, NativeKernels, pointer


class NativeKVPool:
    """Keys and values of `num_layers` layers in `num_pages` pages of `page_size` slots, as bfloat16.

    Memory that was never written is zero and takes no room. Decoding is fastest with a page_size that is a multiple of
    16: other sizes make attention copy keys together first. Raises DeviceError where the memory cannot be had.
    """

    dtype = torch.bfloat16

    def __init__(
        self,
        kernels: NativeKernels,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.device = torch.device("cpu")
        self._kernels = kernels
        try:
            self.handle = kernels.create(
                "dl_pool_create", num_layers, num_pages * page_size, num_kv_heads, head_dim
            )
        except KernelError as error:
            raise DeviceError(f"KV pool of {num_pages} pages of {page_size} tokens: {error}") from error

    @staticmethod
    def bytes_per_page(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int) -> int:
        """Bytes that one page takes over all layers, keys and values together."""
        padded = -(-head_dim // 16) * 16
        return 2 * num_layers * page_size * num_kv_heads * (head_dim + padded)

    def move(self, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        """Copies slot source_slots[i] to target_slots[i] in every layer, as if all at the same time. Both [n] int64."""
        shape = source_slots.shape
        sources = pointer("source_slots", source_slots, torch.int64, shape)
        targets = pointer("target_slots", target_slots, torch.int64, shape)
        self._kernels.call("dl_pool_move", self.handle.address, sources, targets, source_slots.numel())

    def write(self, layer: int, out_slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores the KV of n slots of one layer: out_slots [n] int64, keys and values [n, Hkv, D], rounded."""
        keys, values = keys.to(torch.float32).contiguous(), values.to(torch.float32).contiguous()
        shape = (out_slots.numel(), self.num_kv_heads, self.head_dim)
        self._kernels.call(
            "dl_pool_write",
            self.handle.address,
            layer,
            pointer("out_slots", out_slots, torch.int64, out_slots.shape),
            out_slots.numel(),
            pointer("keys", keys, torch.float32, shape),
            pointer("values", values, torch.float32, shape),
        )

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of n slots of one layer, [n, Hkv, D] float32."""
        keys = torch.empty(slots.numel(), self.num_kv_heads, self.head_dim)
        values = torch.empty_like(keys)
        self._kernels.call(
            "dl_pool_read",
            self.handle.address,
            layer,
            pointer("slots", slots, torch.int64, slots.shape),
            slots.numel(),
            keys.data_ptr(),
            values.data_ptr(),
        )
        return keys, values
