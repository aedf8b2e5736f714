"""The paged KV pool: writes, simultaneous moves, sizes and failures."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.errors import DeviceError
from gpu_worker.kv_pool import KVPool


def make_pool(dtype: torch.dtype = torch.float32) -> KVPool:
    pool = KVPool(3, 4, 4, 2, 8, dtype, "cpu")
    for layer in range(3):
        pool.keys[layer].copy_(torch.randn(16, 2, 8))
        pool.values[layer].copy_(torch.randn(16, 2, 8))
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_touches_its_slots_of_its_layer_only(dtype):
    pool = make_pool(dtype)
    before = [k.clone() for k in pool.keys]
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    pool.write(1, torch.tensor([9, 2, 15]), k, v)
    assert torch.equal(pool.keys[1][[9, 2, 15]], k.to(dtype))
    assert torch.equal(pool.values[1][[9, 2, 15]], v.to(dtype))
    untouched = [i for i in range(16) if i not in (9, 2, 15)]
    assert torch.equal(pool.keys[1][untouched], before[1][untouched])
    assert torch.equal(pool.keys[0], before[0])
    assert torch.equal(pool.keys[2], before[2])


def test_move_reads_every_source_before_it_writes():
    pool = make_pool()
    before = [(k.clone(), v.clone()) for k, v in zip(pool.keys, pool.values, strict=True)]
    source, target = torch.tensor([4, 5, 9]), torch.tensor([3, 4, 5])  # overlapping chain
    pool.move(source, target)
    for layer, (k, v) in enumerate(before):
        k[target], v[target] = k[source], v[source]
        assert torch.equal(pool.keys[layer], k)
        assert torch.equal(pool.values[layer], v)
    pool.move(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))


def test_bytes_per_page_is_what_is_allocated():
    pool = make_pool(torch.bfloat16)
    allocated = sum(t.numel() * t.element_size() for t in (*pool.keys, *pool.values))
    assert allocated == 4 * KVPool.bytes_per_page(3, 4, 2, 8, torch.bfloat16)


def test_allocation_failure_names_the_bytes():
    needed = (1 << 40) * KVPool.bytes_per_page(3, 4, 2, 8, torch.float32)
    with pytest.raises(DeviceError, match=f"{needed} bytes"):
        KVPool(3, 1 << 40, 4, 2, 8, torch.float32, "cpu")


def test_sizes_must_be_positive():
    with pytest.raises(DeviceError, match="num_pages is 0"):
        KVPool(3, 0, 4, 2, 8, torch.float32, "cpu")
