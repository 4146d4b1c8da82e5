"""The receiving end's running handoffs: their records, leases and epochs, and the carrying out of what `step_receiver` decides.

It must not know how messages are routed or how frames move: the receiver hands events in, the frame pump asks whose turn it is.
A handoff is running until nothing is tied to it; one that a newer attempt fenced off settles beside its successor. Times are
seconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from common.clock import Clock
from common.errors import Overloaded, StaleEpoch
from common.types import HandoffTimeline
from kvtransfer.counters import HANDOFFS_COMMITTED, HANDOFFS_FAILED, LEASES_EXPIRED, PROTOCOL_ERROR, STALE_EPOCH, Count
from kvtransfer.frame_mover import Place
from kvtransfer.handoff import Failure, Fault, Forget, LeaseLapsed, LinkLost, LocalAbort, Send
from kvtransfer.lease import EXPIRIES_PER_SWEEP_MAX, LeaseTable
from kvtransfer.link import Link
from kvtransfer.messages import Announce, Closing
from kvtransfer.receiver_handoff import Commit, Fetch, ReceiverHandoff, ReceiverState, ReleaseReservation, step_receiver
from kvtransfer.remembered import Remembered
from kvtransfer.settings import FabricSettings


@dataclass(slots=True, eq=False)
class Incoming:
    """One running handoff. `finished` resolves when nothing touches its blocks any more; `queue` holds frames to be read."""

    record: ReceiverHandoff
    link: Link
    finished: asyncio.Future[Closing | Failure]
    place: Place
    queue: deque[Announce] = field(default_factory=deque)
    is_queued: bool = False
    reserved_s: float = 0.0
    opened_s: float = 0.0
    first_frame_s: float = 0.0
    last_announced_s: float = 0.0
    last_frame_s: float = 0.0
    committed_s: float = 0.0
    num_bytes: int = 0
    transfer_s: float = 0.0
    scatter_s: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        return (self.record.handoff_id, self.record.epoch)

    def timeline(self, block_size: int, transport: str) -> HandoffTimeline:
        """What a committed handoff took. `block_size` is in tokens."""
        return HandoffTimeline(
            reserved_s=self.reserved_s,
            opened_s=self.opened_s,
            first_frame_s=self.first_frame_s,
            last_announced_s=self.last_announced_s,
            last_frame_s=self.last_frame_s,
            committed_s=self.committed_s,
            num_frames=len(self.record.stored),
            num_bytes=self.num_bytes,
            num_blocks=self.record.num_stored_blocks,
            num_cached_tokens=self.record.first_block_index * block_size,
            transfer_s=self.transfer_s,
            scatter_s=self.scatter_s,
            transport=transport,
        )


class IncomingHandoffs:
    """Belongs to one event loop. `on_forgotten` gets the link of each handoff that has ended."""

    def __init__(self, settings: FabricSettings, clock: Clock, count: Count, on_forgotten: Callable[[Link], None]) -> None:
        self._settings = settings
        self._clock = clock
        self._count = count
        self._on_forgotten = on_forgotten
        self._current: dict[str, Incoming] = {}
        self._settling: set[Incoming] = set()
        self._epochs: Remembered[str, int] = Remembered(settings.tombstones_max, settings.tombstone_s)
        self._leases: LeaseTable[tuple[str, int]] = LeaseTable()
        self._ready: deque[Incoming] = deque()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._current) + len(self._settling)

    def get(self, handoff_id: str) -> Incoming | None:
        """The handoff's latest attempt, while it runs."""
        return self._current.get(handoff_id)

    def current(self) -> list[Incoming]:
        """Those that no newer attempt has fenced off."""
        return list(self._current.values())

    def all(self) -> list[Incoming]:
        return [*self._current.values(), *self._settling]

    def last_epoch(self, handoff_id: str) -> int | None:
        """The latest epoch that was entered, as long as it is remembered."""
        return self._epochs.get(handoff_id)

    def states(self) -> dict[str, int]:
        return dict(Counter(entry.record.state.value for entry in self.all()))

    def alive(self) -> Iterator[tuple[Link, tuple[str, int]]]:
        """Those whose senders shall go on."""
        for entry in self._current.values():
            if entry.record.failure is None:
                yield entry.link, entry.key

    # ---- beginnings ------------------------------------------------------------------------------------------------

    def fence(self, handoff_id: str, epoch: int) -> None:
        """An epoch is used once and only grows. Raises StaleEpoch, or Overloaded when too many handoffs run."""
        if len(self) >= self._settings.handoffs_max:
            raise Overloaded(f"{len(self)} handoffs are open, at most {self._settings.handoffs_max} may be")
        running = self._current.get(handoff_id)
        known = self._epochs.get(handoff_id) if running is None else running.record.epoch
        if known is not None and epoch <= known:
            raise StaleEpoch(f"handoff {handoff_id} has been at epoch {known}, this is {epoch}")

    def enter(self, record: ReceiverHandoff, link: Link, block_ids: tuple[int, ...]) -> Incoming:
        """A new attempt, which has passed `fence`. An older one is aborted and settles beside it."""
        older = self._current.get(record.handoff_id)
        if older is not None:
            self._settling.add(older)
            self.step(older, LocalAbort("StaleEpoch", f"epoch {record.epoch} was opened"))
        loop = asyncio.get_running_loop()
        entry = Incoming(record, link, loop.create_future(), Place(link, block_ids, stopping=loop.create_future()))
        now = self._clock.monotonic()
        self._current[record.handoff_id] = entry
        self._epochs.put(record.handoff_id, record.epoch, now)
        self._leases.grant(entry.key, now, self._settings.lease_s)
        return entry

    # ---- carrying out instructions ---------------------------------------------------------------------------------

    def step(self, entry: Incoming, event: Any) -> None:
        step = step_receiver(entry.record, event)
        entry.record = step.record
        if step.fault is not None:
            self._count(STALE_EPOCH if step.fault is Fault.STALE_EPOCH else PROTOCOL_ERROR, 1)
        if entry.record.failure is not None and not entry.place.stopping.done():
            entry.place.stopping.set_result(None)
            entry.queue.clear()
        for instruction in step.instructions:
            self._carry_out(entry, instruction)

    def _carry_out(self, entry: Incoming, instruction: Any) -> None:
        match instruction:
            case Send(message):
                entry.link.send(message)
            case Fetch(frame):
                entry.queue.append(frame)
                self.queue_up(entry)
            case Commit(closing):
                entry.committed_s = self._clock.monotonic()
                self._count(HANDOFFS_COMMITTED, 1)
                entry.finished.set_result(closing)
            case ReleaseReservation(failure):
                self._count(HANDOFFS_FAILED, 1)
                self._leases.drop(entry.key)
                entry.finished.set_result(failure)
            case Forget():
                self._leases.drop(entry.key)
                self._settling.discard(entry)
                if self._current.get(entry.record.handoff_id) is entry:
                    del self._current[entry.record.handoff_id]
                self._on_forgotten(entry.link)

    # ---- whose turn it is to move a frame ----------------------------------------------------------------------------

    def queue_up(self, entry: Incoming) -> None:
        """Gives the handoff a turn if it has a frame to read and is not moving too many."""
        can_start = entry.queue and len(entry.record.moving) < self._settings.frames_in_flight_max
        if can_start and entry.record.state is ReceiverState.RECEIVING and not entry.is_queued:
            entry.is_queued = True
            self._ready.append(entry)
            self._wake.set()

    async def wait_for_ready(self) -> None:
        """Waits until some handoff may have a frame to read."""
        await self._wake.wait()

    def next_ready(self) -> Incoming | None:
        """The next handoff with a frame to read; handoffs take turns."""
        while self._ready:
            entry = self._ready.popleft()
            entry.is_queued = False
            if entry.queue and entry.record.state is ReceiverState.RECEIVING:
                return entry
        self._wake.clear()
        return None

    # ---- links and time ----------------------------------------------------------------------------------------------

    def renew(self, key: tuple[str, int], now: float) -> None:
        """The attempt's sender was heard of it."""
        self._leases.renew(key, now)

    def expire(self, now: float) -> None:
        for key in self._leases.expired(now, EXPIRIES_PER_SWEEP_MAX):
            for entry in [e for e in (self._current.get(key[0]), *self._settling) if e is not None and e.key == key]:
                self._count(LEASES_EXPIRED, 1)
                self.step(entry, LeaseLapsed())
        self._epochs.expired(now)

    def link_lost(self, link: Link, reason: str) -> None:
        for entry in self.all():
            if entry.link is link:
                self.step(entry, LinkLost(reason))
