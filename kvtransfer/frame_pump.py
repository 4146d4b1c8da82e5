"""The moving of frames on the receiving end: one slab for one frame, as many at once as there are slabs.

It must not know links' messages or leases; `frame_mover` knows the way of one frame. Handoffs take turns frame by frame, so that
a long prompt does not hold up a short one. Times are seconds.
"""

from __future__ import annotations

from common.clock import Clock
from common.errors import DeadlineExceeded
from kvtransfer.counters import SLAB_WAITS, Count
from kvtransfer.frame_mover import FrameMover
from kvtransfer.incoming import Incoming, IncomingHandoffs
from kvtransfer.messages import Announce
from kvtransfer.receiver_handoff import FetchStarted, FrameDropped, FrameFailed, FrameStored, ReadSettled
from kvtransfer.settings import FabricSettings
from kvtransfer.staging import Slab, SlabPool
from kvtransfer.tasks import TaskSet


class FramePump:
    """`tasks` gets one task for each moving frame."""

    def __init__(
        self,
        handoffs: IncomingHandoffs,
        mover: FrameMover,
        slabs: SlabPool,
        tasks: TaskSet,
        settings: FabricSettings,
        clock: Clock,
        count: Count,
    ) -> None:
        self._handoffs = handoffs
        self._mover = mover
        self._slabs = slabs
        self._tasks = tasks
        self._settings = settings
        self._clock = clock
        self._count = count

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self._handoffs.wait_for_ready()
            try:
                slab = await self._slabs.acquire(self._settings.transfer_s)
            except DeadlineExceeded:
                self._count(SLAB_WAITS, 1)
                continue
            entry = self._handoffs.next_ready()
            if entry is None:
                self._slabs.release(slab)
                continue
            frame = entry.queue.popleft()
            self._handoffs.step(entry, FetchStarted(frame.frame_index))
            self._tasks.spawn(self._move(entry, frame, slab), f"kv-frame-{frame.handoff_id}-{frame.frame_index}")
            self._handoffs.queue_up(entry)

    async def _move(self, entry: Incoming, frame: Announce, slab: Slab) -> None:
        index = frame.frame_index
        moved = await self._mover.move(entry.place, frame, slab, lambda: self._handoffs.step(entry, ReadSettled(index)))
        if moved.failure is not None:
            self._handoffs.step(entry, FrameFailed(index, moved.failure.kind, moved.failure.reason))
        elif not moved.is_stored:
            self._handoffs.step(entry, FrameDropped(index))
        else:
            entry.last_frame_s = self._clock.monotonic()
            entry.first_frame_s = entry.first_frame_s or entry.last_frame_s
            entry.num_bytes += frame.num_bytes
            entry.transfer_s += moved.transfer_s
            entry.scatter_s += moved.scatter_s
            self._handoffs.step(entry, FrameStored(index))
        if moved.is_read_settled:
            self._handoffs.step(entry, ReadSettled(index))
        self._handoffs.queue_up(entry)
