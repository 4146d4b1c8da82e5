"""The gathering of the sending end: a slab, a gather and an announcement for each frame; handoffs take turns frame by frame.

It must not know links' messages or leases. The copier reads the blocks on a copy thread of its own, which always has the next gather
at hand when one ends; the blocks are under a Hold until their handoff has no gather running. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from common.errors import DeadlineExceeded
from kvtransfer.authentication import frame_digest
from kvtransfer.copier import BlockCopier
from kvtransfer.counters import BYTES_SENT, FRAMES_SENT, SLAB_WAITS, Count
from kvtransfer.layout import KVLayout
from kvtransfer.link import Link
from kvtransfer.messages import Announce
from kvtransfer.outgoing import Outgoing, OutgoingHandoffs
from kvtransfer.sender_handoff import Gather, Gathered, GatherFailed, SlabGranted
from kvtransfer.settings import FabricSettings
from kvtransfer.staging import Slab, SlabPool
from kvtransfer.tasks import TaskSet

_LAST_GATHER_S = 2.0
"""A gather is a bounded local copy: one that runs when the worker stops is waited for, but not for ever."""
_GATHERS_MAX = 2
"""One that runs and one that is next, so that the copy thread does not wait for a turn of the event loop."""


class GatherPump:
    def __init__(
        self,
        handoffs: OutgoingHandoffs,
        slabs: SlabPool,
        copier: BlockCopier,
        layout: KVLayout,
        tasks: TaskSet,
        settings: FabricSettings,
        count: Count,
    ) -> None:
        self._handoffs = handoffs
        self._slabs = slabs
        self._copier = copier
        self._block_bytes = layout.wire_block_bytes
        self._fingerprint = layout.fingerprint()
        self._tasks = tasks
        self._settings = settings
        self._count = count
        self._turns = asyncio.Semaphore(_GATHERS_MAX)
        self._copies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-gather")

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self._handoffs.wait_for_ready()
            await self._turns.acquire()
            if not await self._start_next():
                self._turns.release()

    def close(self) -> None:
        """Ends the copy thread; `run` has been cancelled before."""
        self._copies.shutdown(wait=False, cancel_futures=True)

    async def _start_next(self) -> bool:
        """Starts one gather, which gives its turn back; False if there was none to start, or no slab in time."""
        try:
            slab = await self._slabs.acquire(self._settings.transfer_s)
        except DeadlineExceeded:
            self._count(SLAB_WAITS, 1)
            return False
        entry = self._handoffs.next_ready()
        if entry is None or entry.link is None:
            self._slabs.release(slab)
            return False
        num_blocks_max = min(self._slabs.slab_bytes, entry.link.welcome.slab_bytes) // self._block_bytes
        (gather,) = self._handoffs.step(entry, SlabGranted(num_blocks_max)).instructions
        assert isinstance(gather, Gather), "a granted slab starts a gather"
        entry.slabs[gather.frame_index] = slab
        gathering = self._tasks.spawn(self._gather(entry, entry.link, slab, gather), f"kv-gather-{gather.frame_index}")
        # A callback, because a task that is cancelled before its first step never enters its body.
        gathering.add_done_callback(lambda _: self._gather_ended(entry, gather))
        return True

    def _gather_ended(self, entry: Outgoing, gather: Gather) -> None:
        self._turns.release()
        if gather.frame_index in entry.record.gathering:
            self._handoffs.step(entry, GatherFailed(gather.frame_index, "the worker stops"))

    async def _gather(self, entry: Outgoing, link: Link, slab: Slab, gather: Gather) -> None:
        first, num_bytes = gather.first_block_index, gather.num_blocks * self._block_bytes
        block_ids = entry.block_ids[first : first + gather.num_blocks]
        copy = asyncio.get_running_loop().run_in_executor(self._copies, self._copier.gather, block_ids, slab.view[:num_bytes])
        try:
            payload_digest = await asyncio.shield(copy)
        except asyncio.CancelledError:
            # Only the sender's `close` cancels gathers.
            await asyncio.wait({copy}, timeout=_LAST_GATHER_S)
            raise
        except Exception as error:  # The copier is foreign code: whatever it raises ends this handoff, and both ends know.
            self._handoffs.step(entry, GatherFailed(gather.frame_index, f"{type(error).__name__}: {error}"))
            return
        place = (gather.frame_index, first, gather.num_blocks, num_bytes, slab.offset)
        frame = Announce(entry.record.handoff_id, entry.record.epoch, *place, digest="")
        frame = replace(frame, digest=frame_digest(link.frame_key, self._fingerprint, frame, payload_digest))
        entry.num_bytes += num_bytes
        self._count(FRAMES_SENT, 1)
        self._count(BYTES_SENT, num_bytes)
        self._handoffs.step(entry, Gathered(frame))
