"""The sending end of the fabric: offers of the prefill engine, gathers into slabs, announcements, and when blocks are free again.

It must not know the engine or how bytes travel: blocks are ids, `copier` reads them, and the receiver fetches announced slabs.
All decisions are `step_sender`'s. This shell routes messages and owns the control links and the timers (seconds); `outgoing`
holds the running handoffs, `unoffered` what is known of others, and `gather_pump` copies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.clock import Clock
from common.errors import Draining, Overloaded, StaleEpoch
from kvtransfer.copier import BlockCopier
from kvtransfer.counters import HANDOFFS_OFFERED, PROTOCOL_ERROR, STALE_EPOCH, Count, ignore_counts
from kvtransfer.data_plane import DataPlane
from kvtransfer.gather_pump import GatherPump
from kvtransfer.handoff import Failure, LocalAbort
from kvtransfer.layout import KVLayout
from kvtransfer.link import Link
from kvtransfer.link_handshake import LinkIdentity
from kvtransfer.listener import LinkListener
from kvtransfer.messages import Abort, Ack, Committed, Message, Open, Refuse, Renew, Settled
from kvtransfer.outgoing import HandoffOutcome, OnReleased, OutgoingHandoffs
from kvtransfer.renewals import send_renewals
from kvtransfer.sender_handoff import BlocksFinal, CloseRequested, SenderHandoff
from kvtransfer.settings import FabricSettings
from kvtransfer.staging import SlabCensus, SlabPool
from kvtransfer.tasks import OnFatal, TaskSet, report_to_loop
from kvtransfer.unoffered import UnofferedHandoffs

__all__ = ["HandoffOutcome", "KVSender", "OnReleased", "SenderCensus"]

_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class SenderCensus:
    """`handoffs` counts by state. When idle: no handoffs, no pending opens, all slabs free."""

    handoffs: dict[str, int]
    num_pending_opens: int
    num_links: int
    slabs: SlabCensus


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
        if copier.block_bytes != layout.wire_block_bytes:
            raise ValueError(f"the copier's blocks have {copier.block_bytes} bytes, the layout's {layout.wire_block_bytes}")
        self._identity_args = (worker, cluster_secret, layout, plane.scheme, slabs.slab_bytes, len(slabs.region))
        self._layout = layout
        self._plane = plane
        self._slabs = slabs
        self._clock = clock
        self._settings = settings
        self._count = count
        self._tasks = TaskSet(on_fatal)
        self._listener: LinkListener | None = None
        self._unoffered = UnofferedHandoffs(settings, clock, count)
        self._handoffs = OutgoingHandoffs(slabs, settings, clock, count, self._unoffered.bury)
        self._pump = GatherPump(self._handoffs, slabs, copier, layout, self._tasks, settings, count)
        self._is_draining = False

    # ---- what the worker calls ---------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> str:
        """Listens for control links; returns host:port as bound. The plane must have been started."""
        identity = LinkIdentity(*self._identity_args, description=self._plane.describe())
        self._listener = LinkListener(
            identity, self._settings, self._clock, self._tasks, self._count, on_message=self._on_message, on_lost=self._on_lost
        )
        address = await self._listener.start(host, port)
        self._tasks.spawn(self._pump.run(), "kv-sender-pump")
        self._tasks.spawn(self._sweep(), "kv-sender-sweep")
        return address

    def offer(self, handoff_id: str, epoch: int, num_prompt_tokens: int, on_released: OnReleased) -> None:
        """The engine will compute this prompt. `on_released` is called exactly once, from the event loop, never from inside
        `offer`, when nothing of the fabric needs the blocks any more.

        Raises StaleEpoch, Draining or Overloaded, and then `on_released` is not called.
        """
        known = self._handoffs.get(handoff_id)
        if known is not None and epoch <= known.record.epoch:
            raise StaleEpoch(f"handoff {handoff_id} is at epoch {known.record.epoch}, offered with {epoch}")
        if self._is_draining:
            raise Draining("the worker takes no new handoffs")
        if len(self._handoffs) >= self._settings.handoffs_max:
            raise Overloaded(f"{len(self._handoffs)} handoffs are open, at most {self._settings.handoffs_max} may be")
        if known is not None:
            self._handoffs.replace(known, f"epoch {epoch} was offered")
        early, ended = self._unoffered.take_early(handoff_id), self._unoffered.ended(handoff_id)
        record = SenderHandoff(handoff_id, epoch, num_prompt_tokens, self._layout.num_blocks_of(num_prompt_tokens))
        entry = self._handoffs.enter(record, on_released)
        self._count(HANDOFFS_OFFERED, 1)
        if early is not None and early.message.epoch == epoch:
            self._handoffs.attach(entry, early.link, early.message)
        elif early is not None and early.message.epoch > epoch:
            self._unoffered.keep_early(handoff_id, early)
            self._handoffs.step(entry, LocalAbort("StaleEpoch", f"the receiver is at epoch {early.message.epoch} already"))
        elif ended is not None and ended[0] >= epoch:
            self._handoffs.step(entry, LocalAbort(ended[1].kind, ended[1].reason))
        elif early is not None and isinstance(early.message, Open):
            early.link.send(Abort(handoff_id, early.message.epoch, "StaleEpoch", f"the sender is at epoch {epoch}"))

    def blocks_final(self, handoff_id: str, num_computed_tokens: int, block_ids: Sequence[int]) -> bool:
        """KV of the first `num_computed_tokens` tokens is final in `block_ids`; may be called often, with growing prefixes.

        False if the handoff has ended: the engine may not know yet.
        """
        entry = self._handoffs.get(handoff_id)
        if entry is None:
            return False
        whole = num_computed_tokens >= entry.record.num_prompt_tokens
        num_blocks = entry.record.num_blocks if whole else num_computed_tokens // self._layout.block_size
        table = tuple(block_ids[:num_blocks])
        if len(table) < num_blocks or table[: len(entry.block_ids)] != entry.block_ids:
            raise AssertionError(f"{handoff_id}: {len(block_ids)} block ids for {num_blocks} blocks, or an earlier block changed")
        entry.block_ids = table
        self._handoffs.step(entry, BlocksFinal(num_blocks))
        return True

    def close_handoff(self, handoff_id: str, first_token_id: int, extra: Mapping[str, Any]) -> bool:
        """All blocks are final and token 0 is sampled. `extra` is bounded JSON (16 KiB). False if the handoff has ended."""
        entry = self._handoffs.get(handoff_id)
        if entry is None:
            return False
        self._handoffs.step(entry, CloseRequested(first_token_id, dict(extra)))
        return True

    def abort(self, handoff_id: str, reason: str, kind: str = "ClientCancelled", epoch: int | None = None) -> bool:
        """Gives the handoff up; the receiver is told at once. False if it is unknown here.

        With `epoch`, only that attempt is given up: one that was never offered is remembered, so that its open is answered at
        once when it comes, and an attempt of a newer epoch goes on.
        """
        entry = self._handoffs.get(handoff_id)
        if entry is not None and epoch in (None, entry.record.epoch):
            self._handoffs.step(entry, LocalAbort(kind, reason))
            return True
        if entry is not None and epoch is not None and epoch < entry.record.epoch:
            return False
        return self._unoffered.abort(handoff_id, Failure(kind, reason), epoch)

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new offers and waits for the running ones; False if some are left after `timeout_s`."""
        self._is_draining = True
        for handoff_id in self._unoffered.early_ids():
            self.abort(handoff_id, "the worker drains", "Draining")
        try:
            async with asyncio.timeout(timeout_s):
                await self._handoffs.idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends every handoff (receivers are told), link and task; bounded in time. `on_released` has been called for each."""
        self._is_draining = True
        for entry in self._handoffs.all():
            self._handoffs.step(entry, LocalAbort("Draining", "the worker stops"))
        if self._listener is not None:
            await self._listener.close("the worker stops")
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._handoffs.idle.wait()
        except TimeoutError:
            pass
        await self._tasks.cancel(_CLOSE_S)
        self._pump.close()
        await asyncio.sleep(0)  # The last on_released calls are queued on the loop.

    def census(self) -> SenderCensus:
        num_links = 0 if self._listener is None else len(self._listener.links)
        return SenderCensus(self._handoffs.states(), self._unoffered.num_early, num_links, self._slabs.census())

    # ---- messages ------------------------------------------------------------------------------------------------

    def _on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, Renew):
            self._renewed(link, message)
        elif isinstance(message, Open | Ack | Committed | Refuse | Abort | Settled):
            entry = self._handoffs.get(message.handoff_id)
            if entry is not None and message.epoch > entry.record.epoch and isinstance(message, Open | Refuse | Abort):
                # The receiver knows of a newer attempt than our engine: the older one is fenced off, the newer is awaited.
                self._handoffs.replace(entry, f"the receiver is at epoch {message.epoch}")
                entry = None
            if entry is None:
                self._unoffered.heard(link, message, is_draining=self._is_draining)
            elif isinstance(message, Open) and (message.epoch < entry.record.epoch or entry.link not in (None, link)):
                stale = message.epoch < entry.record.epoch
                self._count(STALE_EPOCH if stale else PROTOCOL_ERROR, 1)
                kind, reason = (
                    ("StaleEpoch", "a newer attempt is offered") if stale else ("HandoffFailed", "another receiver has it")
                )
                link.send(Abort(message.handoff_id, message.epoch, kind, reason))
            elif isinstance(message, Open | Refuse | Abort) and entry.link is None:
                self._handoffs.attach(entry, link, message)
            elif entry.link is not link:
                self._count(PROTOCOL_ERROR, 1)
            else:
                self._handoffs.renew(entry)
                self._handoffs.step(entry, message)
        else:
            self._count(PROTOCOL_ERROR, 1)

    def _renewed(self, link: Link, message: Renew) -> None:
        for handoff_id, epoch in message.handoffs:
            entry = self._handoffs.get(handoff_id)
            if entry is not None and entry.link is link and entry.record.epoch == epoch:
                self._handoffs.renew(entry)
            elif entry is None and not self._unoffered.knows(handoff_id):
                link.send(Abort(handoff_id, epoch, "HandoffFailed", "the sender does not know this handoff"))

    def _on_lost(self, link: Link, reason: str) -> None:
        self._handoffs.link_lost(link, reason)
        self._unoffered.link_lost(link, reason)

    # ---- time --------------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Expires leases and early opens on its own timer, whether or not anything else happens; sends renewals."""
        renewed_s = self._clock.monotonic()
        while True:
            await asyncio.sleep(self._settings.sweep_s)
            now = self._clock.monotonic()
            self._handoffs.expire(now)
            self._unoffered.expire(now)
            if now - renewed_s >= self._settings.lease_s / 3:
                renewed_s = now
                self._send_renewals()

    def _send_renewals(self) -> None:
        send_renewals([*self._handoffs.alive(), *self._unoffered.alive()])
