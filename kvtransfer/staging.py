"""Staging slabs: equal pieces of one page-aligned anonymous mapping, each either free, in use or in quarantine.

It must not know blocks, frames or transports; it only decides when a slab may be used again. A slab whose read has not ended
goes to quarantine and comes home when its operation itself has settled. Sizes are bytes, times monotonic seconds.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import deque
from dataclasses import dataclass

from common.clock import Clock
from common.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """`offset` is the slab's place in the pool's region; `view` are its bytes, writable."""

    index: int
    offset: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class SlabCensus:
    """free + in_use + quarantined = total, always."""

    total: int
    free: int
    in_use: int
    quarantined: int


class SlabPool:
    """Belongs to one event loop. `region` is mapped once and stays mapped until `close`, after the data plane's."""

    def __init__(self, num_slabs: int, slab_bytes: int, clock: Clock) -> None:
        if num_slabs < 1 or slab_bytes < 1:
            raise ValueError(f"a pool needs slabs and bytes, got {num_slabs} slabs of {slab_bytes} bytes")
        self.slab_bytes = slab_bytes
        self._clock = clock
        # Each slab starts on a page of its own, so gather and scatter always see aligned memory.
        stride = -(-slab_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # Private, so no shared-memory segment outlives the process and no child sees the bytes change.
        self._mapping = mmap.mmap(-1, num_slabs * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.region = memoryview(self._mapping)
        self._slabs = [Slab(i, i * stride, self.region[i * stride : i * stride + slab_bytes]) for i in range(num_slabs)]
        # Last returned, first taken: that slab's bytes are still in the processor's cache, so a lone handoff keeps to a few slabs.
        self._free: list[Slab] = self._slabs[::-1]
        self._in_use: set[int] = set()
        self._quarantined_since_s: dict[int, float] = {}
        self._waiters: deque[asyncio.Future[Slab]] = deque()

    async def acquire(self, timeout_s: float) -> Slab:
        """A free slab, first come first served. Raises DeadlineExceeded after `timeout_s` without one."""
        if self._free and not self._waiters:
            return self._take(self._free.pop())
        waiter: asyncio.Future[Slab] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError as error:
            self._undo_grant(waiter)
            raise DeadlineExceeded(f"no free slab within {timeout_s:g} s: {self.census()}") from error
        except asyncio.CancelledError:
            self._undo_grant(waiter)
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def release(self, slab: Slab) -> None:
        """The slab is free again. Only for slabs that nothing touches; raises AssertionError if it is not in use."""
        if slab.index not in self._in_use:
            raise AssertionError(f"slab {slab.index} released but not in use")
        self._in_use.remove(slab.index)
        self._give(slab)

    def quarantine(self, slab: Slab, settled: asyncio.Future[None]) -> None:
        """Sets the slab aside until `settled` has resolved (at once if it has)."""
        if slab.index not in self._in_use:
            raise AssertionError(f"slab {slab.index} quarantined but not in use")
        if settled.done():
            self.release(slab)
            return
        self._in_use.remove(slab.index)
        self._quarantined_since_s[slab.index] = self._clock.monotonic()
        settled.add_done_callback(lambda _: self._end_quarantine(slab))

    def quarantine_age_s(self) -> float:
        """Seconds that the longest quarantine has lasted; 0.0 without any."""
        if not self._quarantined_since_s:
            return 0.0
        return self._clock.monotonic() - min(self._quarantined_since_s.values())

    def census(self) -> SlabCensus:
        return SlabCensus(len(self._slabs), len(self._free), len(self._in_use), len(self._quarantined_since_s))

    def close(self) -> None:
        """Unmaps the region. The data plane is closed before; memory that something still uses stays mapped instead."""
        for slab in self._slabs:
            slab.view.release()
        try:
            self.region.release()
            self._mapping.close()
        except BufferError:
            pass  # Someone still exports the buffer; the mapping then lives until that reference is gone.

    def _take(self, slab: Slab) -> Slab:
        self._in_use.add(slab.index)
        return slab

    def _give(self, slab: Slab) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(self._take(slab))
                return
        self._free.append(slab)

    def _undo_grant(self, waiter: asyncio.Future[Slab]) -> None:
        """A waiter that gave up in the very moment it was served passes the slab on."""
        if waiter.done() and not waiter.cancelled():
            self.release(waiter.result())

    def _end_quarantine(self, slab: Slab) -> None:
        del self._quarantined_since_s[slab.index]
        self._give(slab)
