"""The sending end of the fabric: offers of the prefill engine, gathers into slabs, announcements, and when blocks are free again.

It must not know the engine or how bytes travel: blocks are ids, `copier` reads them, and the receiver fetches announced slabs.
All decisions are `step_sender`'s; this shell owns the slabs, the control links, the copy thread and the timers (seconds).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from common.clock import Clock
from common.errors import DeadlineExceeded, Draining, Overloaded, StaleEpoch
from kvtransfer.authentication import frame_digest
from kvtransfer.copier import BlockCopier
from kvtransfer.counters import (
    BYTES_SENT,
    FRAMES_SENT,
    HANDOFFS_ACKNOWLEDGED,
    HANDOFFS_ENDED_EARLY,
    HANDOFFS_OFFERED,
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
from kvtransfer.handoff import Failure, Fault, Forget, LeaseLapsed, LinkLost, LocalAbort, Send
from kvtransfer.layout import KVLayout
from kvtransfer.lease import LeaseTable
from kvtransfer.link import Link
from kvtransfer.link_handshake import LinkIdentity
from kvtransfer.listener import LinkListener
from kvtransfer.messages import RENEWALS_MAX, Abort, Ack, Announce, Committed, Message, Open, Refuse, Renew, Settled
from kvtransfer.remembered import Remembered
from kvtransfer.sender_handoff import (
    AwaitSettled,
    BlocksFinal,
    CloseRequested,
    Ended,
    Gather,
    Gathered,
    GatherFailed,
    ReleaseBlocks,
    ReturnSlab,
    SenderHandoff,
    SenderState,
    SenderStep,
    SlabGranted,
    step_sender,
)
from kvtransfer.settings import FabricSettings
from kvtransfer.staging import Slab, SlabCensus, SlabPool
from kvtransfer.tasks import OnFatal, TaskSet, report_to_loop

_EXPIRIES_PER_SWEEP_MAX = 256
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class HandoffOutcome:
    """How one offer ended. `failure` is None only for ACKNOWLEDGED."""

    handoff_id: str
    epoch: int
    ended: Ended
    failure: Failure | None
    num_frames: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SenderCensus:
    """`handoffs` counts by state. When idle: no handoffs, no pending opens, all slabs free."""

    handoffs: dict[str, int]
    num_pending_opens: int
    num_links: int
    slabs: SlabCensus


OnReleased = Callable[[HandoffOutcome], None]


@dataclass(slots=True, eq=False)
class _Outgoing:
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


@dataclass(frozen=True, slots=True)
class _Early:
    """What a receiver said of a handoff that the engine has not offered yet."""

    link: Link
    message: Open | Refuse | Abort


class KVSender:
    """One per prefill worker, on one event loop. The owner starts the plane on `slabs.region` before, and closes both after.

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
        self._identity_args = (worker, cluster_secret, layout, plane.scheme, slabs.slab_bytes, len(slabs.region))
        self._layout = layout
        self._fingerprint = layout.fingerprint()
        self._copier = copier
        self._plane = plane
        self._slabs = slabs
        self._clock = clock
        self._settings = settings
        self._count = count
        self._tasks = TaskSet(on_fatal)
        self._copies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-gather")
        self._listener: LinkListener | None = None
        self._outgoing: dict[str, _Outgoing] = {}
        self._replaced: set[_Outgoing] = set()
        self._early: Remembered[str, _Early] = Remembered(settings.pending_opens_max, settings.open_wait_s)
        self._ended: Remembered[str, tuple[int, Failure]] = Remembered(settings.tombstones_max, settings.tombstone_s)
        self._leases: LeaseTable[tuple[str, int]] = LeaseTable()
        self._ready: deque[_Outgoing] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    # ---- what the worker calls ---------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> str:
        """Listens for control links; returns host:port as bound. The plane must have been started."""
        identity = LinkIdentity(*self._identity_args, description=self._plane.describe())
        self._listener = LinkListener(
            identity, self._settings, self._clock, self._tasks, self._count, on_message=self._on_message, on_lost=self._on_lost
        )
        address = await self._listener.start(host, port)
        self._tasks.spawn(self._pump(), "kv-sender-pump")
        self._tasks.spawn(self._sweep(), "kv-sender-sweep")
        return address

    def offer(self, handoff_id: str, epoch: int, num_prompt_tokens: int, on_released: OnReleased) -> None:
        """The engine will compute this prompt. `on_released` is called exactly once, from the event loop, never from inside
        `offer`, when nothing of the fabric needs the blocks any more.

        Raises StaleEpoch, Draining or Overloaded, and then `on_released` is not called.
        """
        known = self._outgoing.get(handoff_id)
        if known is not None and epoch <= known.record.epoch:
            raise StaleEpoch(f"handoff {handoff_id} is at epoch {known.record.epoch}, offered with {epoch}")
        if self._is_draining:
            raise Draining("the worker takes no new handoffs")
        if len(self._outgoing) + len(self._replaced) >= self._settings.handoffs_max:
            raise Overloaded(f"{len(self._outgoing)} handoffs are open, at most {self._settings.handoffs_max} may be")
        if known is not None:
            self._replace(known, f"epoch {epoch} was offered")
        early, ended = self._early.pop(handoff_id), self._ended.get(handoff_id)
        record = SenderHandoff(handoff_id, epoch, num_prompt_tokens, self._layout.num_blocks_of(num_prompt_tokens))
        entry = _Outgoing(record, on_released)
        self._outgoing[handoff_id] = entry
        self._idle.clear()
        self._count(HANDOFFS_OFFERED, 1)
        self._leases.grant(entry.key, self._clock.monotonic(), self._settings.open_wait_s)
        if early is not None and early.message.epoch == epoch:
            self._attach(entry, early.link, early.message)
        elif early is not None and early.message.epoch > epoch:
            self._early.put(handoff_id, early, self._clock.monotonic())
            self._step(entry, LocalAbort("StaleEpoch", f"the receiver is at epoch {early.message.epoch} already"))
        elif ended is not None and ended[0] >= epoch:
            self._step(entry, LocalAbort(ended[1].kind, ended[1].reason))
        elif early is not None and isinstance(early.message, Open):
            early.link.send(Abort(handoff_id, early.message.epoch, "StaleEpoch", f"the sender is at epoch {epoch}"))

    def blocks_final(self, handoff_id: str, num_computed_tokens: int, block_ids: Sequence[int]) -> bool:
        """KV of the first `num_computed_tokens` tokens is final in `block_ids`; may be called often, with growing prefixes.

        False if the handoff has ended: the engine may not know yet.
        """
        entry = self._outgoing.get(handoff_id)
        if entry is None:
            return False
        whole = num_computed_tokens >= entry.record.num_prompt_tokens
        num_blocks = entry.record.num_blocks if whole else num_computed_tokens // self._layout.block_size
        table = tuple(block_ids[:num_blocks])
        if len(table) < num_blocks or table[: len(entry.block_ids)] != entry.block_ids:
            raise AssertionError(f"{handoff_id}: {len(block_ids)} block ids for {num_blocks} blocks, or an earlier block changed")
        entry.block_ids = table
        self._step(entry, BlocksFinal(num_blocks))
        return True

    def close_handoff(self, handoff_id: str, first_token_id: int, extra: Mapping[str, Any]) -> bool:
        """All blocks are final and token 0 is sampled. `extra` is bounded JSON (16 KiB). False if the handoff has ended."""
        entry = self._outgoing.get(handoff_id)
        if entry is None:
            return False
        self._step(entry, CloseRequested(first_token_id, dict(extra)))
        return True

    def abort(self, handoff_id: str, reason: str, kind: str = "ClientCancelled", epoch: int | None = None) -> bool:
        """Gives the handoff up; the receiver is told at once. False if it is unknown here.

        With `epoch`, an attempt that was never offered is remembered too, and its open is answered at once when it comes.
        """
        entry = self._outgoing.get(handoff_id)
        if entry is not None:
            self._step(entry, LocalAbort(kind, reason))
            return True
        early = self._early.pop(handoff_id)
        if early is None:
            if epoch is not None:
                self._bury(handoff_id, epoch, Failure(kind, reason))
            return False
        self._bury(handoff_id, early.message.epoch, Failure(kind, reason))
        if isinstance(early.message, Open):
            early.link.send(Abort(handoff_id, early.message.epoch, kind, reason[:512]))
        return True

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new offers and waits for the running ones; False if some are left after `timeout_s`."""
        self._is_draining = True
        for handoff_id, _ in self._early.items():
            self.abort(handoff_id, "the worker drains", "Draining")
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends every handoff (receivers are told), link and task; bounded in time. `on_released` has been called for each."""
        self._is_draining = True
        for entry in [*self._outgoing.values(), *self._replaced]:
            self._step(entry, LocalAbort("Draining", "the worker stops"))
        if self._listener is not None:
            await self._listener.close("the worker stops")
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._idle.wait()
        except TimeoutError:
            pass
        await self._tasks.cancel(_CLOSE_S)
        self._copies.shutdown(wait=False, cancel_futures=True)
        await asyncio.sleep(0)  # The last on_released calls are queued on the loop.

    def census(self) -> SenderCensus:
        entries = [*self._outgoing.values(), *self._replaced]
        num_links = 0 if self._listener is None else len(self._listener.links)
        states = Counter(entry.record.state.value for entry in entries)
        return SenderCensus(dict(states), len(self._early), num_links, self._slabs.census())

    # ---- messages ------------------------------------------------------------------------------------------------

    def _on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, Renew):
            self._renewed(link, message)
        elif isinstance(message, Open | Ack | Committed | Refuse | Abort | Settled):
            entry = self._outgoing.get(message.handoff_id)
            if entry is not None and message.epoch > entry.record.epoch and isinstance(message, Open | Refuse | Abort):
                # The receiver knows of a newer attempt than our engine: the older one is fenced off, the newer is awaited.
                self._replace(entry, f"the receiver is at epoch {message.epoch}")
                entry = None
            if entry is None:
                self._not_offered(link, message)
            elif isinstance(message, Open) and (message.epoch < entry.record.epoch or entry.link not in (None, link)):
                stale = message.epoch < entry.record.epoch
                self._count(STALE_EPOCH if stale else PROTOCOL_ERROR, 1)
                kind, reason = (
                    ("StaleEpoch", "a newer attempt is offered") if stale else ("HandoffFailed", "another receiver has it")
                )
                link.send(Abort(message.handoff_id, message.epoch, kind, reason))
            elif isinstance(message, Open | Refuse | Abort) and entry.link is None:
                self._attach(entry, link, message)
            elif entry.link is not link:
                self._count(PROTOCOL_ERROR, 1)
            else:
                if entry.record.state is not SenderState.CLOSING:
                    self._leases.renew(entry.key, self._clock.monotonic())
                self._step(entry, message)
        else:
            self._count(PROTOCOL_ERROR, 1)

    def _replace(self, entry: _Outgoing, reason: str) -> None:
        """A newer epoch fences this one off; it settles beside its successor."""
        del self._outgoing[entry.record.handoff_id]
        self._replaced.add(entry)
        self._step(entry, LocalAbort("StaleEpoch", reason))

    def _attach(self, entry: _Outgoing, link: Link, message: Open | Refuse | Abort) -> None:
        """The receiver's first word on an offer, whichever of the two came first."""
        if message.epoch != entry.record.epoch:
            self._step(entry, message)
            return
        if not link.is_open:
            self._step(entry, LocalAbort("HandoffFailed", f"link lost: {link.close_reason}"))
            return
        entry.link = link
        if isinstance(message, Open):
            self._leases.grant(entry.key, self._clock.monotonic(), self._settings.lease_s)
        self._step(entry, message)

    def _not_offered(self, link: Link, message: Open | Ack | Committed | Refuse | Abort | Settled) -> None:
        ended = self._ended.get(message.handoff_id)
        early = self._early.get(message.handoff_id)
        if ended is not None and message.epoch <= ended[0]:
            self._count(STALE_EPOCH if message.epoch < ended[0] else LATE_MESSAGE, 1)
            if isinstance(message, Open):
                link.send(Abort(message.handoff_id, message.epoch, ended[1].kind, ended[1].reason[:512]))
        elif early is not None and message.epoch < early.message.epoch:
            self._count(STALE_EPOCH, 1)
        elif isinstance(message, Open | Refuse | Abort):
            if (
                early is not None
                and message.epoch == early.message.epoch
                and (early.link is not link or isinstance(message, Open))
            ):
                self._count(PROTOCOL_ERROR, 1)
            elif isinstance(message, Open) and (self._is_draining or (early is None and self._early.is_full)):
                kind = "Draining" if self._is_draining else "Overloaded"
                link.send(Abort(message.handoff_id, message.epoch, kind, f"{len(self._early)} opens wait for their offer"))
            else:
                self._early.put(message.handoff_id, _Early(link, message), self._clock.monotonic())
        else:
            self._count(LATE_MESSAGE if early is not None else PROTOCOL_ERROR, 1)

    def _renewed(self, link: Link, message: Renew) -> None:
        now = self._clock.monotonic()
        for handoff_id, epoch in message.handoffs:
            entry = self._outgoing.get(handoff_id)
            if entry is not None and entry.link is link and entry.record.epoch == epoch:
                if entry.record.state is not SenderState.CLOSING:
                    self._leases.renew(entry.key, now)
            elif entry is None and self._early.get(handoff_id) is None and self._ended.get(handoff_id) is None:
                link.send(Abort(handoff_id, epoch, "HandoffFailed", "the sender does not know this handoff"))

    def _on_lost(self, link: Link, reason: str) -> None:
        for entry in [*self._outgoing.values(), *self._replaced]:
            if entry.link is link:
                self._step(entry, LinkLost(reason))
        for handoff_id, early in self._early.items():
            if early.link is link:
                self._early.pop(handoff_id)
                failure = Failure("HandoffFailed", f"the receiver was lost before the offer: {reason}")
                self._bury(handoff_id, early.message.epoch, failure)

    # ---- carrying out instructions ---------------------------------------------------------------------------------

    def _step(self, entry: _Outgoing, event: Any) -> SenderStep:
        step = step_sender(entry.record, event)
        entry.record = step.record
        if step.fault is not None:
            self._count(STALE_EPOCH if step.fault is Fault.STALE_EPOCH else PROTOCOL_ERROR, 1)
        for instruction in step.instructions:
            self._carry_out(entry, instruction)
        if entry.record.num_ready_blocks and not entry.is_queued:
            entry.is_queued = True
            self._ready.append(entry)
            self._wake.set()
        return step

    def _carry_out(self, entry: _Outgoing, instruction: Any) -> None:
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
                if self._outgoing.get(record.handoff_id) is entry:
                    del self._outgoing[record.handoff_id]
                self._bury(record.handoff_id, record.epoch, record.failure or Failure("StaleEpoch", "handed over already"))
                if not self._outgoing and not self._replaced:
                    self._idle.set()
            case Gather():
                pass  # The pump that granted the slab carries it out.

    def _bury(self, handoff_id: str, epoch: int, failure: Failure) -> None:
        known = self._ended.get(handoff_id)
        if known is None or known[0] <= epoch:
            self._ended.put(handoff_id, (epoch, failure), self._clock.monotonic())

    # ---- gathering ---------------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        """One slab, one gather, one announcement at a time; handoffs take turns frame by frame."""
        while True:
            await self._wake.wait()
            try:
                slab = await self._slabs.acquire(self._settings.transfer_s)
            except DeadlineExceeded:
                self._count(SLAB_WAITS, 1)
                continue
            entry = self._next_ready()
            if entry is None or entry.link is None:
                self._slabs.release(slab)
                continue
            await self._gather(entry, entry.link, slab)

    def _next_ready(self) -> _Outgoing | None:
        while self._ready:
            entry = self._ready.popleft()
            entry.is_queued = False
            if entry.record.num_ready_blocks:
                return entry
        self._wake.clear()
        return None

    async def _gather(self, entry: _Outgoing, link: Link, slab: Slab) -> None:
        block_bytes = self._layout.block_bytes
        num_blocks_max = min(self._slabs.slab_bytes, link.welcome.slab_bytes) // block_bytes
        (gather,) = self._step(entry, SlabGranted(num_blocks_max)).instructions
        assert isinstance(gather, Gather), "a granted slab starts a gather"
        entry.slabs[gather.frame_index] = slab
        first, num_bytes = gather.first_block_index, gather.num_blocks * block_bytes
        block_ids = entry.block_ids[first : first + gather.num_blocks]
        copy = asyncio.get_running_loop().run_in_executor(self._copies, self._copier.gather, block_ids, slab.view[:num_bytes])
        try:
            payload_digest = await asyncio.shield(copy)
        except asyncio.CancelledError:
            # Only `close` cancels the pump; a gather is a bounded local copy, so its end is near.
            await asyncio.wait({copy}, timeout=_CLOSE_S)
            self._step(entry, GatherFailed(gather.frame_index, "the worker stops"))
            raise
        except Exception as error:  # The copier is foreign code: whatever it raises ends this handoff, and both ends know.
            self._step(entry, GatherFailed(gather.frame_index, f"{type(error).__name__}: {error}"))
            return
        place = (gather.frame_index, first, gather.num_blocks, num_bytes, slab.offset)
        frame = Announce(entry.record.handoff_id, entry.record.epoch, *place, digest="")
        frame = replace(frame, digest=frame_digest(link.frame_key, self._fingerprint, frame, payload_digest))
        entry.num_bytes += num_bytes
        self._count(FRAMES_SENT, 1)
        self._count(BYTES_SENT, num_bytes)
        self._step(entry, Gathered(frame))

    # ---- time --------------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Expires leases and early opens on its own timer, whether or not anything else happens; sends renewals."""
        renewed_s = self._clock.monotonic()
        while True:
            await asyncio.sleep(self._settings.sweep_s)
            now = self._clock.monotonic()
            for key in self._leases.expired(now, _EXPIRIES_PER_SWEEP_MAX):
                self._lapsed(key)
            for handoff_id, early in self._early.expired(now):
                failure = Failure("HandoffFailed", f"no prefill was started within {self._settings.open_wait_s:g} s of the open")
                self._bury(handoff_id, early.message.epoch, failure)
                if isinstance(early.message, Open):
                    self._count(LEASES_EXPIRED, 1)
                    early.link.send(Abort(handoff_id, early.message.epoch, failure.kind, failure.reason))
            self._ended.expired(now)
            if now - renewed_s >= self._settings.lease_s / 3:
                renewed_s = now
                self._send_renewals()

    def _lapsed(self, key: tuple[str, int]) -> None:
        for entry in [e for e in (self._outgoing.get(key[0]), *self._replaced) if e is not None and e.key == key]:
            closing = entry.record.state is SenderState.CLOSING
            self._count(QUARANTINE_EXPIRED if closing else LEASES_EXPIRED, 1)
            self._step(entry, LeaseLapsed())

    def _send_renewals(self) -> None:
        alive: dict[Link, list[tuple[str, int]]] = {}
        for entry in self._outgoing.values():
            if entry.link is not None and entry.record.state is not SenderState.CLOSING:
                alive.setdefault(entry.link, []).append(entry.key)
        for handoff_id, early in self._early.items():
            if isinstance(early.message, Open):
                alive.setdefault(early.link, []).append((handoff_id, early.message.epoch))
        for link, keys in alive.items():
            for start in range(0, len(keys), RENEWALS_MAX):
                link.send(Renew(tuple(keys[start : start + RENEWALS_MAX])))
