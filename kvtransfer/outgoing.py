"""The sending end's running handoffs: their records, leases and slabs, and the carrying out of what `step_sender` decides.

It must not know how messages are routed or how blocks are gathered: the sender hands events in, the gather pump asks whose turn
it is. A handoff is running from its offer until nothing is tied to it; one that a newer attempt fenced off settles beside its
successor. Times are seconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from common.clock import Clock
from kvtransfer.counters import (
    HANDOFFS_ACKNOWLEDGED,
    HANDOFFS_ENDED_EARLY,
    LEASES_EXPIRED,
    PROTOCOL_ERROR,
    QUARANTINE_EXPIRED,
    STALE_EPOCH,
    Count,
)
from kvtransfer.handoff import Failure, Fault, Forget, LeaseLapsed, LinkLost, LocalAbort, Send
from kvtransfer.lease import EXPIRIES_PER_SWEEP_MAX, LeaseTable
from kvtransfer.link import Link
from kvtransfer.messages import Abort, Open, Refuse
from kvtransfer.sender_handoff import (
    AwaitSettled,
    Ended,
    Gather,
    ReleaseBlocks,
    ReturnSlab,
    SenderHandoff,
    SenderState,
    SenderStep,
    step_sender,
)
from kvtransfer.settings import FabricSettings
from kvtransfer.staging import Slab, SlabPool


@dataclass(frozen=True, slots=True)
class HandoffOutcome:
    """How one offer ended. `failure` is None only for ACKNOWLEDGED."""

    handoff_id: str
    epoch: int
    ended: Ended
    failure: Failure | None
    num_frames: int
    num_bytes: int


OnReleased = Callable[[HandoffOutcome], None]


@dataclass(slots=True, eq=False)
class Outgoing:
    """One running handoff. `link` is the receiver's, from its first word on; `slabs` are those of frames not yet returned."""

    record: SenderHandoff
    on_released: OnReleased
    block_ids: tuple[int, ...] = ()
    link: Link | None = None
    slabs: dict[int, Slab] = field(default_factory=dict)
    num_bytes: int = 0
    is_queued: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return (self.record.handoff_id, self.record.epoch)


class OutgoingHandoffs:
    """Belongs to one event loop. `on_ended` gets (handoff id, epoch, failure) when a handoff is forgotten."""

    def __init__(
        self,
        slabs: SlabPool,
        settings: FabricSettings,
        clock: Clock,
        count: Count,
        on_ended: Callable[[str, int, Failure], None],
    ) -> None:
        self.idle = asyncio.Event()
        """Set while no handoff runs."""
        self.idle.set()
        self._slabs = slabs
        self._settings = settings
        self._clock = clock
        self._count = count
        self._on_ended = on_ended
        self._current: dict[str, Outgoing] = {}
        self._replaced: set[Outgoing] = set()
        self._leases: LeaseTable[tuple[str, int]] = LeaseTable()
        self._ready: deque[Outgoing] = deque()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._current) + len(self._replaced)

    def get(self, handoff_id: str) -> Outgoing | None:
        """The handoff's latest attempt."""
        return self._current.get(handoff_id)

    def all(self) -> list[Outgoing]:
        return [*self._current.values(), *self._replaced]

    def states(self) -> dict[str, int]:
        return dict(Counter(entry.record.state.value for entry in self.all()))

    def alive(self) -> Iterator[tuple[Link, tuple[str, int]]]:
        """Those whose receivers may go on."""
        for entry in self._current.values():
            if entry.link is not None and entry.record.state is not SenderState.CLOSING:
                yield entry.link, entry.key

    # ---- beginnings ------------------------------------------------------------------------------------------------

    def enter(self, record: SenderHandoff, on_released: OnReleased) -> Outgoing:
        """A new offer; it expires unless a receiver speaks of it in time."""
        entry = Outgoing(record, on_released)
        self._current[record.handoff_id] = entry
        self.idle.clear()
        self._leases.grant(entry.key, self._clock.monotonic(), self._settings.open_wait_s)
        return entry

    def replace(self, entry: Outgoing, reason: str) -> None:
        """A newer epoch fences this one off; it settles beside its successor."""
        del self._current[entry.record.handoff_id]
        self._replaced.add(entry)
        self.step(entry, LocalAbort("StaleEpoch", reason))

    def attach(self, entry: Outgoing, link: Link, message: Open | Refuse | Abort) -> None:
        """The receiver's first word on an offer, whichever of the two came first."""
        if message.epoch != entry.record.epoch:
            self.step(entry, message)
            return
        if not link.is_open:
            self.step(entry, LocalAbort("HandoffFailed", f"link lost: {link.close_reason}"))
            return
        entry.link = link
        if isinstance(message, Open):
            self._leases.grant(entry.key, self._clock.monotonic(), self._settings.lease_s)
        self.step(entry, message)

    # ---- carrying out instructions ---------------------------------------------------------------------------------

    def step(self, entry: Outgoing, event: Any) -> SenderStep:
        step = step_sender(entry.record, event)
        entry.record = step.record
        if step.fault is not None:
            self._count(STALE_EPOCH if step.fault is Fault.STALE_EPOCH else PROTOCOL_ERROR, 1)
        for instruction in step.instructions:
            self._carry_out(entry, instruction)
        if self._may_gather(entry) and not entry.is_queued:
            entry.is_queued = True
            self._ready.append(entry)
            self._wake.set()
        return step

    def _carry_out(self, entry: Outgoing, instruction: Any) -> None:
        record = entry.record
        match instruction:
            case Send(message):
                if entry.link is not None:
                    entry.link.send(message)
            case ReturnSlab(frame_index):
                self._slabs.release(entry.slabs.pop(frame_index))
            case ReleaseBlocks(ended, failure):
                self._count(HANDOFFS_ACKNOWLEDGED if failure is None else HANDOFFS_ENDED_EARLY, 1)
                outcome = HandoffOutcome(record.handoff_id, record.epoch, ended, failure, record.num_frames, entry.num_bytes)
                asyncio.get_running_loop().call_soon(entry.on_released, outcome)
            case AwaitSettled():
                self._leases.grant(entry.key, self._clock.monotonic(), self._settings.quarantine_s)
            case Forget():
                self._leases.drop(entry.key)
                self._replaced.discard(entry)
                if self._current.get(record.handoff_id) is entry:
                    del self._current[record.handoff_id]
                self._on_ended(record.handoff_id, record.epoch, record.failure or Failure("StaleEpoch", "handed over already"))
                if not self._current and not self._replaced:
                    self.idle.set()
            case Gather():
                pass  # The pump that granted the slab carries it out.

    # ---- whose turn it is to gather ----------------------------------------------------------------------------------

    async def wait_for_ready(self) -> None:
        """Waits until some handoff may have blocks to gather."""
        await self._wake.wait()

    def next_ready(self) -> Outgoing | None:
        """The next handoff with blocks to gather; handoffs take turns."""
        while self._ready:
            entry = self._ready.popleft()
            entry.is_queued = False
            if self._may_gather(entry):
                return entry
        self._wake.clear()
        return None

    def _may_gather(self, entry: Outgoing) -> bool:
        """It has blocks to gather and not too many frames on their way; an acknowledgement makes room for the next."""
        num_in_flight = len(entry.record.gathering) + len(entry.record.unacked)
        return entry.record.num_ready_blocks > 0 and num_in_flight < self._settings.frames_in_flight_max

    # ---- links and time ----------------------------------------------------------------------------------------------

    def renew(self, entry: Outgoing) -> None:
        """Its receiver was heard. The bound of a quarantine is not pushed out."""
        if entry.record.state is not SenderState.CLOSING:
            self._leases.renew(entry.key, self._clock.monotonic())

    def expire(self, now: float) -> None:
        for key in self._leases.expired(now, EXPIRIES_PER_SWEEP_MAX):
            for entry in [e for e in (self._current.get(key[0]), *self._replaced) if e is not None and e.key == key]:
                closing = entry.record.state is SenderState.CLOSING
                self._count(QUARANTINE_EXPIRED if closing else LEASES_EXPIRED, 1)
                self.step(entry, LeaseLapsed())

    def link_lost(self, link: Link, reason: str) -> None:
        for entry in self.all():
            if entry.link is link:
                self.step(entry, LinkLost(reason))
