"""The receiving end of the fabric: opens a handoff, fetches announced frames into slabs, verifies while it scatters, commits.

It must not know the engine: the caller holds the blocks under a Hold until `receive` has returned or raised. All decisions are
`step_receiver`'s; this shell owns the slabs, the links, the copy thread and the timers (seconds). The scatter runs on a copy
thread of its own, not at the engine's step border: the Hold protects the blocks, and no sequence reads them before the commit.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from common.clock import Clock
from common.errors import BatonError, DeadlineExceeded, HandoffFailed, Internal, Overloaded, StaleEpoch, error_from_kind
from common.types import HandoffTimeline
from kvtransfer.copier import BlockCopier
from kvtransfer.counters import (
    HANDOFFS_COMMITTED,
    HANDOFFS_FAILED,
    LATE_MESSAGE,
    LEASES_EXPIRED,
    PROTOCOL_ERROR,
    QUARANTINE_EXPIRED,
    SLAB_WAITS,
    STALE_EPOCH,
    Count,
    ignore_counts,
)
from kvtransfer.data_plane import DataPlane
from kvtransfer.dialler import LinkDialler
from kvtransfer.frame_mover import FrameMover, Place
from kvtransfer.handoff import Failure, Fault, Forget, LeaseLapsed, LinkLost, LocalAbort, Send
from kvtransfer.layout import KVLayout
from kvtransfer.lease import LeaseTable
from kvtransfer.link import Link
from kvtransfer.link_handshake import LinkIdentity
from kvtransfer.messages import RENEWALS_MAX, Abort, Announce, Closing, Message, Open, Refuse, Renew, Settled
from kvtransfer.receiver_handoff import (
    Commit,
    Fetch,
    FetchStarted,
    FrameDropped,
    FrameFailed,
    FrameStored,
    ReadSettled,
    ReceiverHandoff,
    ReceiverState,
    ReleaseReservation,
    step_receiver,
)
from kvtransfer.remembered import Remembered
from kvtransfer.settings import FabricSettings
from kvtransfer.staging import Slab, SlabCensus, SlabPool
from kvtransfer.tasks import OnFatal, TaskSet, report_to_loop

_EXPIRIES_PER_SWEEP_MAX = 256
_CLOSE_S = 2.0
_RAISED_KINDS = frozenset({"HandoffFailed", "LeaseExpired", "LayoutMismatch", "KVCorrupt", "StaleEpoch", "DeadlineExceeded"})


@dataclass(frozen=True, slots=True)
class Received:
    """What the sender closed the handoff with. All blocks are in place and verified."""

    first_token_id: int
    extra: dict[str, Any]
    timeline: HandoffTimeline


@dataclass(frozen=True, slots=True)
class ReceiverCensus:
    """`handoffs` counts by state. When idle: no handoffs, all slabs free."""

    handoffs: dict[str, int]
    num_links: int
    slabs: SlabCensus


@dataclass(slots=True, eq=False)
class _Incoming:
    record: ReceiverHandoff
    block_ids: tuple[int, ...]
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


class KVReceiver:
    """One per decode worker, on one event loop. The owner starts the plane on `slabs.region` before, and closes both after.

    `on_fatal` gets exceptions that are bugs; the worker stops then. `count` gets the names of `counters`.
    """

    def __init__(
        self,
        *,
        worker: str,
        layout: KVLayout,
        copier: BlockCopier,
        plane: DataPlane,
        slabs: SlabPool,
        clock: Clock,
        cluster_secret: bytes,
        settings: FabricSettings,
        count: Count = ignore_counts,
        on_fatal: OnFatal = report_to_loop,
    ) -> None:
        if copier.block_bytes != layout.block_bytes:
            raise ValueError(f"the copier's blocks have {copier.block_bytes} bytes, the layout's {layout.block_bytes}")
        self.unhealthy: str | None = None
        """Set when memory did not settle in time; the worker should report it and stop taking work."""
        self._layout = layout
        self._slabs = slabs
        self._clock = clock
        self._settings = settings
        self._count = count
        self._scheme = plane.scheme
        self._tasks = TaskSet(on_fatal)
        self._timers = TaskSet(on_fatal)
        self._links = TaskSet(on_fatal)
        self._copies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-scatter")
        self._mover = FrameMover(plane, copier, slabs, self._copies, layout.fingerprint(), settings, clock, count)
        identity = LinkIdentity(worker, cluster_secret, layout, plane.scheme, slabs.slab_bytes, len(slabs.region))
        self._dialler = LinkDialler(
            identity, plane, settings, clock, self._links, count, on_message=self._on_message, on_lost=self._on_lost
        )
        self._incoming: dict[str, _Incoming] = {}
        self._settling: set[_Incoming] = set()
        self._epochs: Remembered[str, int] = Remembered(settings.tombstones_max, settings.tombstone_s)
        self._leases: LeaseTable[tuple[str, int]] = LeaseTable()
        self._link_used_s: dict[Link, float] = {}
        self._ready: deque[_Incoming] = deque()
        self._wake = asyncio.Event()
        self._has_started = False
        self._is_closing = False

    # ---- what the worker calls ---------------------------------------------------------------------------------

    async def receive(
        self,
        *,
        handoff_id: str,
        epoch: int,
        peer: str,
        address: str,
        num_prompt_tokens: int,
        first_block_index: int,
        block_ids: Sequence[int],
        deadline_s: float,
    ) -> Received:
        """Fills blocks `block_ids[first_block_index:]` from the sender `peer` (id@incarnation) at `address` (host:port).

        `block_ids` is the block table of the whole prompt, `deadline_s` seconds from now. Raises HandoffFailed, LeaseExpired,
        LayoutMismatch, KVCorrupt, StaleEpoch, DeadlineExceeded, or Overloaded when too many handoffs are open. Cancelling it
        is the abort. However it ends, nothing of the fabric touches the blocks any more when it has ended: a running scatter
        is waited for, and a running read only ever writes into a slab, which stays in quarantine. (Internal is raised if a
        scatter outlasts the quarantine: the blocks must then not be reused, and `unhealthy` is set.)
        """
        started_s = self._clock.monotonic()
        num_blocks = self._layout.num_blocks_of(num_prompt_tokens)
        if num_prompt_tokens < 1 or not 0 <= first_block_index <= num_blocks <= len(block_ids):
            raise ValueError(f"{num_prompt_tokens} tokens from block {first_block_index} into {len(block_ids)} blocks")
        self._fence(handoff_id, epoch)
        self._start()
        try:
            async with asyncio.timeout(deadline_s):
                link = await self._dialler.link_to(peer, address)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no link to {peer} at {address} within {deadline_s:g} s") from error
        except asyncio.CancelledError:
            # The sender does not know us yet; it is told as soon as the link is there, so that no lease has to run out.
            told = self.refuse(
                address=address, peer=peer, handoff_id=handoff_id, epoch=epoch, reason="cancelled", kind="ClientCancelled"
            )
            self._tasks.spawn(told, f"kv-refuse-{handoff_id}")
            raise
        self._fence(handoff_id, epoch)  # A newer attempt may have come while the link was dialled.
        entry = self._enter(handoff_id, epoch, link, num_prompt_tokens, first_block_index, tuple(block_ids[:num_blocks]))
        entry.reserved_s = started_s
        if not link.send(Open(handoff_id, epoch, num_prompt_tokens, first_block_index)):
            self._step(entry, LinkLost(link.close_reason or "closed"))
        entry.opened_s = self._clock.monotonic()
        try:
            await asyncio.wait({entry.finished}, timeout=max(0.0, started_s + deadline_s - entry.opened_s))
            if not entry.finished.done():
                self._step(entry, LocalAbort("DeadlineExceeded", f"not complete within {deadline_s:g} s"))
        except asyncio.CancelledError:
            self._step(entry, LocalAbort("ClientCancelled", "the receiving request was cancelled"))
            await self._settled(entry)
            raise
        await self._settled(entry)
        ended = entry.finished.result()
        if isinstance(ended, Failure):
            raise _error_of(handoff_id, ended)
        return Received(ended.first_token_id, dict(ended.extra), self._timeline(entry))

    async def refuse(
        self, *, address: str, peer: str, handoff_id: str, epoch: int, reason: str, kind: str = "Overloaded"
    ) -> bool:
        """Tells the sender at once that this worker will not open the handoff. False if it could not be told in time."""
        self._start()
        try:
            async with asyncio.timeout(self._settings.connect_s):
                link = await self._dialler.link_to(peer, address)
        except (TimeoutError, BatonError):
            return False
        self._link_used_s[link] = self._clock.monotonic()
        return link.send(Refuse(handoff_id, epoch, kind, reason[:512]))

    async def close(self) -> None:
        """Aborts every handoff (senders are told), waits for it to settle, ends links and tasks; bounded in time."""
        self._is_closing = True
        for entry in list(self._incoming.values()):
            self._step(entry, LocalAbort("HandoffFailed", "the worker stops"))
        await self._tasks.wait(_CLOSE_S)
        await self._dialler.close("the worker stops")
        await self._links.wait(_CLOSE_S)
        for tasks in (self._links, self._timers, self._tasks):
            await tasks.cancel(_CLOSE_S)
        self._copies.shutdown(wait=False, cancel_futures=True)

    def census(self) -> ReceiverCensus:
        states = Counter(entry.record.state.value for entry in [*self._incoming.values(), *self._settling])
        return ReceiverCensus(dict(states), len(self._dialler.links), self._slabs.census())

    # ---- the life of one handoff -----------------------------------------------------------------------------------

    def _fence(self, handoff_id: str, epoch: int) -> None:
        """An epoch is used once and only grows. Raises StaleEpoch, HandoffFailed when closing, Overloaded when full."""
        if self._is_closing:
            raise HandoffFailed("the worker stops")
        if len(self._incoming) + len(self._settling) >= self._settings.handoffs_max:
            raise Overloaded(f"{len(self._incoming)} handoffs are open, at most {self._settings.handoffs_max} may be")
        running = self._incoming.get(handoff_id)
        known = self._epochs.get(handoff_id) if running is None else running.record.epoch
        if known is not None and epoch <= known:
            raise StaleEpoch(f"handoff {handoff_id} has been at epoch {known}, this is {epoch}")

    def _enter(
        self, handoff_id: str, epoch: int, link: Link, num_prompt_tokens: int, first_block_index: int, block_ids: tuple[int, ...]
    ) -> _Incoming:
        older = self._incoming.get(handoff_id)
        if older is not None:
            self._settling.add(older)
            self._step(older, LocalAbort("StaleEpoch", f"epoch {epoch} was opened"))
        record = ReceiverHandoff(
            handoff_id,
            epoch,
            first_block_index,
            len(block_ids),
            self._layout.block_bytes,
            min(self._slabs.slab_bytes, link.welcome.slab_bytes),
            link.welcome.region_bytes,
        )
        loop = asyncio.get_running_loop()
        place = Place(link, block_ids, stopping=loop.create_future())
        entry = _Incoming(record, block_ids, link, loop.create_future(), place)
        now = self._clock.monotonic()
        self._incoming[handoff_id] = entry
        self._epochs.put(handoff_id, epoch, now)
        self._leases.grant(entry.key, now, self._settings.lease_s)
        self._link_used_s[link] = now
        return entry

    async def _settled(self, entry: _Incoming) -> None:
        """Waits until nothing touches the blocks. Not cancellable, because the caller frees them next; bounded."""
        end_s = self._clock.monotonic() + self._settings.quarantine_s
        cancelled = False
        while not entry.finished.done() and (left_s := end_s - self._clock.monotonic()) > 0:
            try:
                await asyncio.wait({entry.finished}, timeout=left_s)
            except asyncio.CancelledError:
                cancelled = True
        if not entry.finished.done():
            self.unhealthy = f"a scatter of handoff {entry.record.handoff_id} did not end in {self._settings.quarantine_s:g} s"
            raise Internal(self.unhealthy)
        if cancelled:
            raise asyncio.CancelledError

    def _timeline(self, entry: _Incoming) -> HandoffTimeline:
        record = entry.record
        return HandoffTimeline(
            reserved_s=entry.reserved_s,
            opened_s=entry.opened_s,
            first_frame_s=entry.first_frame_s,
            last_announced_s=entry.last_announced_s,
            last_frame_s=entry.last_frame_s,
            committed_s=entry.committed_s,
            num_frames=len(record.stored),
            num_bytes=entry.num_bytes,
            num_blocks=record.num_stored_blocks,
            num_cached_tokens=record.first_block_index * self._layout.block_size,
            transfer_s=entry.transfer_s,
            scatter_s=entry.scatter_s,
            transport=self._scheme,
        )

    # ---- messages ------------------------------------------------------------------------------------------------

    def _on_message(self, link: Link, message: Message) -> None:
        now = self._clock.monotonic()
        if isinstance(message, Renew):
            for handoff_id, epoch in message.handoffs:
                self._leases.renew((handoff_id, epoch), now)
            return
        if not isinstance(message, Announce | Closing | Abort):
            self._count(PROTOCOL_ERROR, 1)
            return
        entry = self._incoming.get(message.handoff_id)
        if entry is None:
            self._not_receiving(link, message)
        elif entry.link is not link:
            self._count(PROTOCOL_ERROR, 1)
        else:
            if message.epoch == entry.record.epoch:
                self._leases.renew(entry.key, now)
                if not isinstance(message, Abort):
                    entry.last_announced_s = now
            self._step(entry, message)

    def _not_receiving(self, link: Link, message: Announce | Closing | Abort) -> None:
        epoch = self._epochs.get(message.handoff_id)
        if epoch is None:
            self._count(PROTOCOL_ERROR, 1)
            if not isinstance(message, Abort):
                link.send(Abort(message.handoff_id, message.epoch, "HandoffFailed", "the receiver does not know this handoff"))
        else:
            self._count(STALE_EPOCH if message.epoch < epoch else LATE_MESSAGE, 1)
        link.send(Settled(message.handoff_id, message.epoch))

    def _on_lost(self, link: Link, reason: str) -> None:
        self._link_used_s.pop(link, None)
        for entry in [*self._incoming.values(), *self._settling]:
            if entry.link is link:
                self._step(entry, LinkLost(reason))

    # ---- carrying out instructions ---------------------------------------------------------------------------------

    def _step(self, entry: _Incoming, event: Any) -> None:
        step = step_receiver(entry.record, event)
        entry.record = step.record
        if step.fault is not None:
            self._count(STALE_EPOCH if step.fault is Fault.STALE_EPOCH else PROTOCOL_ERROR, 1)
        if entry.record.failure is not None and not entry.place.stopping.done():
            entry.place.stopping.set_result(None)
            entry.queue.clear()
        for instruction in step.instructions:
            self._carry_out(entry, instruction)

    def _carry_out(self, entry: _Incoming, instruction: Any) -> None:
        match instruction:
            case Send(message):
                entry.link.send(message)
            case Fetch(frame):
                entry.queue.append(frame)
                self._queue(entry)
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
                if self._incoming.get(entry.record.handoff_id) is entry:
                    del self._incoming[entry.record.handoff_id]
                if entry.link.is_open:
                    self._link_used_s[entry.link] = self._clock.monotonic()

    # ---- moving frames ---------------------------------------------------------------------------------------------

    def _queue(self, entry: _Incoming) -> None:
        can_start = entry.queue and len(entry.record.moving) < self._settings.frames_in_flight_max
        if can_start and entry.record.state is ReceiverState.RECEIVING and not entry.is_queued:
            entry.is_queued = True
            self._ready.append(entry)
            self._wake.set()

    async def _pump(self) -> None:
        """One slab for one frame; handoffs take turns frame by frame, and as many frames move as there are slabs."""
        while True:
            await self._wake.wait()
            try:
                slab = await self._slabs.acquire(self._settings.transfer_s)
            except DeadlineExceeded:
                self._count(SLAB_WAITS, 1)
                continue
            entry = self._next_ready()
            if entry is None:
                self._slabs.release(slab)
                continue
            frame = entry.queue.popleft()
            self._step(entry, FetchStarted(frame.frame_index))
            self._tasks.spawn(self._move(entry, frame, slab), f"kv-frame-{frame.handoff_id}-{frame.frame_index}")
            self._queue(entry)

    def _next_ready(self) -> _Incoming | None:
        while self._ready:
            entry = self._ready.popleft()
            entry.is_queued = False
            if entry.queue and entry.record.state is ReceiverState.RECEIVING:
                return entry
        self._wake.clear()
        return None

    async def _move(self, entry: _Incoming, frame: Announce, slab: Slab) -> None:
        index = frame.frame_index
        moved = await self._mover.move(entry.place, frame, slab, lambda: self._step(entry, ReadSettled(index)))
        if moved.failure is not None:
            self._step(entry, FrameFailed(index, moved.failure.kind, moved.failure.reason))
        elif not moved.is_stored:
            self._step(entry, FrameDropped(index))
        else:
            entry.last_frame_s = self._clock.monotonic()
            entry.first_frame_s = entry.first_frame_s or entry.last_frame_s
            entry.num_bytes += frame.num_bytes
            entry.transfer_s += moved.transfer_s
            entry.scatter_s += moved.scatter_s
            self._step(entry, FrameStored(index))
        if moved.is_read_settled:
            self._step(entry, ReadSettled(index))
        self._queue(entry)

    # ---- time --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """The pump and the sweeper start with the first use, inside the event loop that they belong to."""
        if not self._has_started and not self._is_closing:
            self._has_started = True
            self._timers.spawn(self._pump(), "kv-receiver-pump")
            self._timers.spawn(self._sweep(), "kv-receiver-sweep")

    async def _sweep(self) -> None:
        """Expires leases, watches quarantines and closes idle links on its own timer; sends renewals."""
        renewed_s = self._clock.monotonic()
        while True:
            await asyncio.sleep(self._settings.sweep_s)
            now = self._clock.monotonic()
            for key in self._leases.expired(now, _EXPIRIES_PER_SWEEP_MAX):
                for entry in [e for e in (self._incoming.get(key[0]), *self._settling) if e is not None and e.key == key]:
                    self._count(LEASES_EXPIRED, 1)
                    self._step(entry, LeaseLapsed())
            self._epochs.expired(now)
            self._watch_quarantine(now)
            await self._close_idle_links(now)
            if now - renewed_s >= self._settings.lease_s / 3:
                renewed_s = now
                self._send_renewals()

    def _watch_quarantine(self, now: float) -> None:
        """A read that does not settle costs its link; if even that does not settle it, the worker is unhealthy."""
        for link, since_s in self._mover.quarantined():
            if now - since_s >= 2 * self._settings.quarantine_s and self.unhealthy is None:
                self.unhealthy = f"a read from {link.peer} has not settled for {now - since_s:.1f} s"
            if now - since_s >= self._settings.quarantine_s and link.is_open:
                self._count(QUARANTINE_EXPIRED, 1)
                link.abort("a read did not settle within the quarantine")

    async def _close_idle_links(self, now: float) -> None:
        busy = {entry.link for entry in [*self._incoming.values(), *self._settling]}
        for link in self._dialler.links:
            if link not in busy and now - self._link_used_s.setdefault(link, now) >= self._settings.idle_link_s:
                await link.close("idle")

    def _send_renewals(self) -> None:
        alive: dict[Link, list[tuple[str, int]]] = {}
        for entry in self._incoming.values():
            if entry.record.failure is None:
                alive.setdefault(entry.link, []).append(entry.key)
        for link, keys in alive.items():
            for start in range(0, len(keys), RENEWALS_MAX):
                link.send(Renew(tuple(keys[start : start + RENEWALS_MAX])))


def _error_of(handoff_id: str, failure: Failure) -> BatonError:
    """Only the fabric's own kinds leave it: what a peer calls its failure must not become, say, a 401 for the client."""
    if failure.kind in _RAISED_KINDS:
        return error_from_kind(failure.kind, f"handoff {handoff_id}: {failure.reason}")
    return HandoffFailed(f"handoff {handoff_id}: {failure.kind}: {failure.reason}")
