"""The native KV pool: what is written is read back as bfloat16, and slots move like memory does not."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.errors import DeviceError
from gpu_worker.kernels.kv_pool import NativeKVPool
from gpu_worker.kernels.native import KernelError
from tests.gpu_worker.kernels.conftest import installed


def filled(head_dim: int = 16, page_size: int = 4) -> tuple[NativeKVPool, torch.Tensor, torch.Tensor]:
    """A pool of 3 layers and 10 pages, and what lies in it: keys and values [layers, slots, 2, head_dim]."""
    pool = NativeKVPool(installed(), 3, 10, page_size, 2, head_dim)
    keys, values = torch.randn(2, 3, 10 * page_size, 2, head_dim, generator=torch.Generator().manual_seed(0))
    for layer in range(3):
        pool.write(layer, torch.arange(10 * page_size), keys[layer], values[layer])
    return pool, keys.to(torch.bfloat16).float(), values.to(torch.bfloat16).float()


@pytest.mark.parametrize("head_dim", [2, 16, 64, 80, 96, 128])
def test_reads_what_was_written(head_dim: int) -> None:
    pool, keys, values = filled(head_dim, page_size=5)
    slots = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    for layer in range(3):
        read_keys, read_values = pool.read(layer, slots)
        assert torch.equal(read_keys, keys[layer, slots])
        assert torch.equal(read_values, values[layer, slots])


def test_new_memory_is_zero() -> None:
    pool = NativeKVPool(installed(), 1, 4, 16, 1, 64)
    for part in pool.read(0, torch.arange(64)):
        assert not part.any()


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([5], [30]),
        ([1, 2, 3], [2, 3, 4]),
        ([7, 6], [6, 7]),
        (list(range(20)), list(range(3, 23))),
        ([4, 4], [0, 39]),
    ],
)
def test_moves_read_everything_first(sources: list[int], targets: list[int]) -> None:
    pool, keys, values = filled()
    pool.move(torch.tensor(sources), torch.tensor(targets))
    keys[:, targets], values[:, targets] = keys[:, sources].clone(), values[:, sources].clone()
    for layer in range(3):
        read_keys, read_values = pool.read(layer, torch.arange(40))
        assert torch.equal(read_keys, keys[layer])
        assert torch.equal(read_values, values[layer])


def test_bytes_per_page_are_those_of_bfloat16() -> None:
    assert NativeKVPool.bytes_per_page(30, 16, 3, 64) == 30 * 16 * 3 * 64 * 2 * 2


def test_errors() -> None:
    pool, _, _ = filled()
    with pytest.raises(KernelError, match="slots: 40"):
        pool.read(0, torch.tensor([40]))
    with pytest.raises(KernelError, match="slots: 3 -> -1"):
        pool.move(torch.tensor([3]), torch.tensor([-1]))
    with pytest.raises(KernelError, match="layer: 3"):
        pool.read(3, torch.tensor([0]))
    with pytest.raises(DeviceError, match="head_dim: 15"):
        NativeKVPool(installed(), 1, 1, 16, 1, 15)
    with pytest.raises(DeviceError, match="cannot allocate"):
        NativeKVPool(installed(), 1000, 1 << 40, 16, 8, 128)
    with pytest.raises(DeviceError, match="cannot allocate"):
        NativeKVPool(installed(), 100, 1 << 32, 16, 1, 64)
