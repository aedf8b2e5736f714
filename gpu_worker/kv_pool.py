"""The paged KV cache of one model: attention layers write into it, attention backends read from it.

Pages are owned by the scheduler's ledger; this module only knows token slots (page_id * page_size + offset).
Memory that was never written is uninitialised: readers must touch only slots that their page table names.
"""

from __future__ import annotations

from typing import Protocol

import torch

from gpu_worker.errors import DeviceError


class PagedPool(Protocol):
    """What the model runner needs of any model's KV memory; models write and read it in their own way."""

    page_size: int

    def move(self, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        """Copies slot source_slots[i] to target_slots[i] in every layer, as if all at the same time."""
        ...


class KVPool:
    """Keys and values of `num_layers` layers in `num_pages` pages of `page_size` token slots.

    `keys[layer]` and `values[layer]` are [num_pages * page_size, num_kv_heads, head_dim] views of two tensors
    that hold all layers, so that moving an accepted path is one gather and one scatter for the whole model.

    Raises:
        DeviceError: a size is not positive, or the device cannot give the memory (the message says how much).
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_pages": num_pages,
            "page_size": page_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise DeviceError(f"KV pool: {name} is {size}, it must be at least 1")
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (num_layers, num_pages * page_size, num_kv_heads, head_dim)
        num_bytes = num_pages * self.bytes_per_page(num_layers, page_size, num_kv_heads, head_dim, dtype)
        try:
            self._keys = torch.empty(shape, dtype=dtype, device=self.device)
            self._values = torch.empty(shape, dtype=dtype, device=self.device)
        except (RuntimeError, MemoryError) as error:
            raise DeviceError(
                f"KV pool: {num_bytes} bytes for {num_pages} pages of {page_size} tokens cannot be allocated"
                f" on {self.device}: {str(error).splitlines()[0]}"
            ) from error
        self.keys: tuple[torch.Tensor, ...] = self._keys.unbind(0)
        self.values: tuple[torch.Tensor, ...] = self._values.unbind(0)

    @staticmethod
    def bytes_per_page(
        num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one page takes over all layers, keys and values together."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, out_slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores the KV of T rows of one layer.

        out_slots [T] int64, distinct; keys and values [T, Hkv, D] of any float dtype (cast to the pool's).
        """
        self.keys[layer].index_copy_(0, out_slots, keys.to(self.dtype))
        self.values[layer].index_copy_(0, out_slots, values.to(self.dtype))

    def move(self, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        """Copies slot source_slots[i] to target_slots[i] in every layer, as if all at the same time.

        Used to lay an accepted tree path into contiguous slots. Both [n] int64; targets are distinct; sources
        and targets may overlap, since every source is read before any target is written.
        """
        if source_slots.numel() == 0:
            return
        for pool in (self._keys, self._values):
            pool.index_copy_(1, target_slots, pool.index_select(1, source_slots))
