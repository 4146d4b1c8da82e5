"""The receiving end of the fabric: opens a handoff, fetches announced frames into slabs, verifies while it scatters, commits.

It must not know the engine: the caller holds the blocks under a Hold until `receive` has returned or raised. All decisions are
`step_receiver`'s. This shell routes messages and owns the links, the copy thread and the timers (seconds); `incoming` holds the
running handoffs, and `frame_pump` moves frames. The scatter runs on a copy thread of its own, not at the engine's step border:
the Hold protects the blocks, and no sequence reads them before the commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from common.clock import Clock
from common.errors import BatonError, DeadlineExceeded, HandoffFailed, Internal, error_from_kind
from common.types import HandoffTimeline
from kvtransfer.copier import BlockCopier
from kvtransfer.counters import LATE_MESSAGE, PROTOCOL_ERROR, QUARANTINE_EXPIRED, STALE_EPOCH, Count, ignore_counts
from kvtransfer.data_plane import DataPlane
from kvtransfer.dialler import LinkDialler
from kvtransfer.frame_mover import FrameMover
from kvtransfer.frame_pump import FramePump
from kvtransfer.handoff import Failure, LinkLost, LocalAbort
from kvtransfer.incoming import Incoming, IncomingHandoffs
from kvtransfer.layout import KVLayout
from kvtransfer.link import Link
from kvtransfer.link_handshake import LinkIdentity
from kvtransfer.messages import Abort, Announce, Closing, Message, Open, Refuse, Renew, Settled, short_reason
from kvtransfer.receiver_handoff import ReceiverHandoff
from kvtransfer.renewals import send_renewals
from kvtransfer.settings import FabricSettings
from kvtransfer.staging import SlabCensus, SlabPool
from kvtransfer.tasks import OnFatal, TaskSet, report_to_loop

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
        if copier.block_bytes != layout.wire_block_bytes:
            raise ValueError(f"the copier's blocks have {copier.block_bytes} bytes, the layout's {layout.wire_block_bytes}")
        self.unhealthy: str | None = None
        """Set when memory did not settle in time; the worker should report it and stop taking work."""
        self._layout = layout
        self._slabs = slabs
        self._clock = clock
        self._settings = settings
        self._count = count
        self._transport = plane.scheme if layout.wire == "none" else f"{plane.scheme}+{layout.wire}"
        self._tasks = TaskSet(on_fatal)
        self._timers = TaskSet(on_fatal)
        self._links = TaskSet(on_fatal)
        self._copies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-scatter")
        self._mover = FrameMover(plane, copier, slabs, self._copies, layout.fingerprint(), settings, clock, count)
        identity = LinkIdentity(worker, cluster_secret, layout, plane.scheme, slabs.slab_bytes, len(slabs.region))
        self._dialler = LinkDialler(
            identity, plane, settings, clock, self._links, count, on_message=self._on_message, on_lost=self._on_lost
        )
        self._handoffs = IncomingHandoffs(settings, clock, count, self._dialler.used)
        self._pump = FramePump(self._handoffs, self._mover, slabs, self._tasks, settings, clock, count)
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
        record = ReceiverHandoff(
            handoff_id,
            epoch,
            first_block_index,
            num_blocks,
            self._layout.wire_block_bytes,
            min(self._slabs.slab_bytes, link.welcome.slab_bytes),
            link.welcome.region_bytes,
        )
        entry = self._handoffs.enter(record, link, tuple(block_ids[:num_blocks]))
        entry.reserved_s = started_s
        self._dialler.used(link)
        if not link.send(Open(handoff_id, epoch, num_prompt_tokens, first_block_index)):
            self._handoffs.step(entry, LinkLost(link.close_reason or "closed"))
        entry.opened_s = self._clock.monotonic()
        try:
            await asyncio.wait({entry.finished}, timeout=max(0.0, started_s + deadline_s - entry.opened_s))
            if not entry.finished.done():
                self._handoffs.step(entry, LocalAbort("DeadlineExceeded", f"not complete within {deadline_s:g} s"))
        except asyncio.CancelledError:
            self._handoffs.step(entry, LocalAbort("ClientCancelled", "the receiving request was cancelled"))
            await self._settled(entry)
            raise
        await self._settled(entry)
        ended = entry.finished.result()
        if isinstance(ended, Failure):
            raise _error_of(handoff_id, ended)
        return Received(ended.first_token_id, dict(ended.extra), entry.timeline(self._layout.block_size, self._transport))

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
        self._dialler.used(link)
        return link.send(Refuse(handoff_id, epoch, kind, short_reason(reason)))

    async def close(self) -> None:
        """Aborts every handoff (senders are told), waits for it to settle, ends links and tasks; bounded in time."""
        self._is_closing = True
        for entry in self._handoffs.current():
            self._handoffs.step(entry, LocalAbort("HandoffFailed", "the worker stops"))
        await self._tasks.wait(_CLOSE_S)
        await self._dialler.close("the worker stops")
        await self._links.wait(_CLOSE_S)
        for tasks in (self._links, self._timers, self._tasks):
            await tasks.cancel(_CLOSE_S)
        self._copies.shutdown(wait=False, cancel_futures=True)

    def census(self) -> ReceiverCensus:
        return ReceiverCensus(self._handoffs.states(), len(self._dialler.links), self._slabs.census())

    # ---- the life of one handoff -----------------------------------------------------------------------------------

    def _fence(self, handoff_id: str, epoch: int) -> None:
        """An epoch is used once and only grows. Raises StaleEpoch, HandoffFailed when closing, Overloaded when full."""
        if self._is_closing:
            raise HandoffFailed("the worker stops")
        self._handoffs.fence(handoff_id, epoch)

    async def _settled(self, entry: Incoming) -> None:
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

    # ---- messages ------------------------------------------------------------------------------------------------

    def _on_message(self, link: Link, message: Message) -> None:
        now = self._clock.monotonic()
        if isinstance(message, Renew):
            for handoff_id, epoch in message.handoffs:
                self._handoffs.renew((handoff_id, epoch), now)
            return
        if not isinstance(message, Announce | Closing | Abort):
            self._count(PROTOCOL_ERROR, 1)
            return
        entry = self._handoffs.get(message.handoff_id)
        if entry is None:
            self._not_receiving(link, message)
        elif entry.link is not link:
            self._count(PROTOCOL_ERROR, 1)
        else:
            if message.epoch == entry.record.epoch:
                self._handoffs.renew(entry.key, now)
                if not isinstance(message, Abort):
                    entry.last_announced_s = now
            self._handoffs.step(entry, message)

    def _not_receiving(self, link: Link, message: Announce | Closing | Abort) -> None:
        epoch = self._handoffs.last_epoch(message.handoff_id)
        if epoch is None:
            self._count(PROTOCOL_ERROR, 1)
            if not isinstance(message, Abort):
                link.send(Abort(message.handoff_id, message.epoch, "HandoffFailed", "the receiver does not know this handoff"))
        else:
            self._count(STALE_EPOCH if message.epoch < epoch else LATE_MESSAGE, 1)
        link.send(Settled(message.handoff_id, message.epoch))

    def _on_lost(self, link: Link, reason: str) -> None:
        self._handoffs.link_lost(link, reason)

    # ---- time --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """The pump and the sweeper start with the first use, inside the event loop that they belong to."""
        if not self._has_started and not self._is_closing:
            self._has_started = True
            self._timers.spawn(self._pump.run(), "kv-receiver-pump")
            self._timers.spawn(self._sweep(), "kv-receiver-sweep")

    async def _sweep(self) -> None:
        """Expires leases, watches quarantines and closes idle links on its own timer; sends renewals."""
        renewed_s = self._clock.monotonic()
        while True:
            await asyncio.sleep(self._settings.sweep_s)
            now = self._clock.monotonic()
            self._handoffs.expire(now)
            self._watch_quarantine(now)
            await self._dialler.close_idle(now, busy={entry.link for entry in self._handoffs.all()})
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

    def _send_renewals(self) -> None:
        send_renewals([*self._handoffs.alive()])


def _error_of(handoff_id: str, failure: Failure) -> BatonError:
    """Only the fabric's own kinds leave it: what a peer calls its failure must not become, say, a 401 for the client."""
    if failure.kind in _RAISED_KINDS:
        return error_from_kind(failure.kind, f"handoff {handoff_id}: {failure.reason}")
    return HandoffFailed(f"handoff {handoff_id}: {failure.kind}: {failure.reason}")
