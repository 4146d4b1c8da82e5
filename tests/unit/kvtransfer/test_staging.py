"""Slabs: bounded waits, first come first served, no slab twice, no slab lost, and quarantine until the read has settled."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import random

import pytest

from common.clock import FakeClock
from common.errors import DeadlineExceeded
from kvtransfer.staging import SlabCensus, SlabPool


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


def future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_slabs_are_page_aligned_disjoint_pieces_of_one_region(clock: FakeClock) -> None:
    pool = SlabPool(3, 5000, clock)
    slabs = [await pool.acquire(0.1) for _ in range(3)]
    base = ctypes.addressof(ctypes.c_char.from_buffer(pool.region))
    assert base % mmap.PAGESIZE == 0 and all(slab.offset % mmap.PAGESIZE == 0 and len(slab.view) == 5000 for slab in slabs)
    for slab in slabs:
        slab.view[:] = bytes([slab.index + 1]) * 5000
    for slab in slabs:
        assert bytes(pool.region[slab.offset : slab.offset + 5000]) == bytes([slab.index + 1]) * 5000


async def test_a_wait_without_a_free_slab_ends_in_time_and_says_where_they_are(clock: FakeClock) -> None:
    pool = SlabPool(1, 64, clock)
    slab = await pool.acquire(0.1)
    with pytest.raises(DeadlineExceeded, match="in_use=1"):
        await pool.acquire(0.02)
    pool.release(slab)
    assert (await pool.acquire(0.02)) is slab
    pool.release(slab)
    pool.close()


async def test_waiters_are_served_first_come_first_served(clock: FakeClock) -> None:
    pool = SlabPool(1, 64, clock)
    slab = await pool.acquire(1.0)
    order: list[int] = []

    async def one(n: int) -> None:
        mine = await pool.acquire(1.0)
        order.append(n)
        pool.release(mine)

    async with asyncio.TaskGroup() as group:
        for n in range(5):
            group.create_task(one(n))
            await asyncio.sleep(0)
        pool.release(slab)
    assert order == [0, 1, 2, 3, 4] and pool.census().free == 1


async def test_double_release_is_a_bug_and_says_so(clock: FakeClock) -> None:
    pool = SlabPool(1, 64, clock)
    slab = await pool.acquire(0.1)
    pool.release(slab)
    with pytest.raises(AssertionError, match="released but not in use"):
        pool.release(slab)
    with pytest.raises(AssertionError, match="quarantined but not in use"):
        pool.quarantine(slab, future())


async def test_a_quarantined_slab_comes_home_only_when_its_read_has_settled(clock: FakeClock) -> None:
    pool = SlabPool(1, 64, clock)
    slab, settled = await pool.acquire(0.1), future()
    pool.quarantine(slab, settled)
    clock.advance(3.0)
    assert pool.census() == SlabCensus(total=1, free=0, in_use=0, quarantined=1) and pool.quarantine_age_s() == 3.0
    with pytest.raises(DeadlineExceeded):
        await pool.acquire(0.02)
    waiting = asyncio.create_task(pool.acquire(1.0))
    await asyncio.sleep(0)
    settled.set_result(None)
    assert (await waiting) is slab
    assert pool.census().in_use == 1 and pool.quarantine_age_s() == 0.0
    settled_already = future()
    settled_already.set_result(None)
    pool.quarantine(slab, settled_already)
    assert pool.census().free == 1


async def test_cancelled_waiters_lose_no_slab(clock: FakeClock) -> None:
    """Cancelled before, in the very moment of, and after the grant; afterwards all slabs are there."""
    rng = random.Random(4)
    pool = SlabPool(2, 64, clock)

    async def one() -> None:
        slab = await pool.acquire(rng.choice([0.0, 0.001, 1.0]))
        try:
            await asyncio.sleep(0)
        finally:
            pool.release(slab)

    for _ in range(200):
        tasks = [asyncio.create_task(one()) for _ in range(5)]
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        for task in rng.sample(tasks, 3):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert pool.census() == SlabCensus(total=2, free=2, in_use=0, quarantined=0)


async def test_closing_while_somebody_exports_the_memory_keeps_it_mapped(clock: FakeClock) -> None:
    pool = SlabPool(1, 64, clock)
    exported = pool.region[:64]
    pool.close()
    exported[0] = 7
    assert exported[0] == 7


def test_a_pool_needs_slabs_and_bytes(clock: FakeClock) -> None:
    for arguments in ((0, 64), (1, 0)):
        with pytest.raises(ValueError, match="needs slabs and bytes"):
            SlabPool(*arguments, clock)
