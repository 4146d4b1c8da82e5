"""The paged KV cache: layout, laziness, and copies that touch exactly the named blocks."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

from engine.kv_cache import KVCache
from kernels.reference import ReferenceOps

CPU = torch.device("cpu")


def make_cache(num_blocks: int = 6, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    return KVCache(num_blocks, 2, 3, 16, 8, dtype, CPU, ReferenceOps())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_layout_and_sizes() -> None:
    cache = make_cache()
    assert cache.tensor.shape == (6, 2, 2, 3, 16, 8)
    assert cache.tensor.is_contiguous() and cache.tensor.dtype == torch.bfloat16
    assert cache.block_bytes == 2 * 2 * 3 * 16 * 8 * 2 == cache.tensor[0].numel() * 2
    assert cache.num_bytes == 6 * cache.block_bytes
    assert not cache.tensor.any()


def test_blocks_survive_a_round_trip_to_other_places() -> None:
    sender, receiver = make_cache(), make_cache()
    sender.tensor.copy_(torch.randn(sender.tensor.shape))
    slab = memoryview(bytearray(3 * sender.block_bytes + 64))
    digest = sender.gather([5, 0, 3], slab)
    assert receiver.scatter(slab, [1, 2, 4]) == digest
    assert torch.equal(receiver.tensor[[1, 2, 4]], sender.tensor[[5, 0, 3]])
    assert not receiver.tensor[[0, 3, 5]].any()


def test_a_pool_costs_nothing_until_it_is_used() -> None:
    before = resident_bytes()
    cache = KVCache(1 << 14, 4, 4, 16, 64, torch.bfloat16, CPU, ReferenceOps())
    assert cache.num_bytes == 1 << 30
    assert resident_bytes() - before < 16 << 20
    cache.tensor[7] = 1.0
    assert resident_bytes() - before < 24 << 20


def test_the_memory_lives_as_long_as_the_tensor_and_no_longer() -> None:
    tensor = KVCache(1 << 10, 4, 4, 16, 64, torch.bfloat16, CPU, ReferenceOps()).tensor
    gc.collect()
    tensor.fill_(2.0)  # would crash if the mapping had gone with the cache object
    assert tensor[-1, -1, -1, -1, -1, -1] == 2.0
    before = resident_bytes()
    del tensor
    gc.collect()
    assert before - resident_bytes() > 48 << 20


def test_copies_on_another_thread_leave_the_other_blocks_to_the_engine() -> None:
    cache = make_cache(num_blocks=8, dtype=torch.float32)
    cache.tensor[:4] = 1.0
    slab = memoryview(bytearray(4 * cache.block_bytes))
    expected = cache.gather([0, 1, 2, 3], slab)
    wrong: list[bytes] = []

    def copy() -> None:
        for _ in range(50):
            cache.scatter(slab, [3, 1, 0, 2])
            if (digest := cache.gather([0, 1, 2, 3], slab)) != expected:
                wrong.append(digest)

    thread = threading.Thread(target=copy)
    thread.start()
    for value in range(50):
        cache.tensor[4:] = float(value)
    thread.join(30)
    assert not thread.is_alive() and not wrong
    assert (cache.tensor[4:] == 49.0).all()


@pytest.mark.parametrize("extent", range(5))
def test_an_empty_extent_is_refused(extent: int) -> None:
    extents = [4, 2, 3, 16, 8]
    extents[extent] = 0
    with pytest.raises(ValueError, match="holds nothing"):
        KVCache(*extents, torch.float32, CPU, ReferenceOps())


def test_blocks_outside_the_pool_are_refused() -> None:
    cache = make_cache()
    with pytest.raises(ValueError, match="outside the cache's 6 blocks"):
        cache.gather([6], memoryview(bytearray(cache.block_bytes)))
    with pytest.raises(ValueError, match="cannot hold"):
        cache.scatter(memoryview(bytearray(cache.block_bytes)), [0, 1])
