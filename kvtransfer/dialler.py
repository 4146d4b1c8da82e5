"""The receiving worker's links to sending workers: one for each peer incarnation, shared by all handoffs with it.

It must not know handoffs; it reports messages and lost links to its owner. A link and the data plane's connection to the same
peer live and end together, under one task for each peer; nobody gets a link before the plane is connected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from common.clock import Clock
from common.errors import BatonError, HandoffFailed
from kvtransfer.counters import LINKS_LOST, LINKS_OPENED, LINKS_REFUSED, Count
from kvtransfer.data_plane import DataPlane
from kvtransfer.link import Link
from kvtransfer.link_handshake import LinkIdentity, dial
from kvtransfer.messages import Message
from kvtransfer.settings import FabricSettings
from kvtransfer.tasks import TaskSet


@dataclass(slots=True, eq=False)
class _Peer:
    name: str
    address: str
    ready: asyncio.Future[Link]
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    is_ending: bool = False
    task: asyncio.Task[None] | None = None


class LinkDialler:
    def __init__(
        self,
        identity: LinkIdentity,
        plane: DataPlane,
        settings: FabricSettings,
        clock: Clock,
        tasks: TaskSet,
        count: Count,
        *,
        on_message: Callable[[Link, Message], None],
        on_lost: Callable[[Link, str], None],
    ) -> None:
        self._identity = identity
        self._plane = plane
        self._settings = settings
        self._clock = clock
        self._tasks = tasks
        self._count = count
        self._on_message = on_message
        self._on_lost = on_lost
        self._peers: dict[str, _Peer] = {}
        self._used_s: dict[Link, float] = {}
        self._is_closing = False

    @property
    def links(self) -> list[Link]:
        """The links that are ready for use."""
        return [
            p.ready.result() for p in self._peers.values() if p.ready.done() and not p.is_ending and p.ready.exception() is None
        ]

    async def link_to(self, peer: str, address: str) -> Link:
        """The one link to `peer` (id@incarnation), dialled if there is none; the caller bounds the wait.

        Raises LayoutMismatch or HandoffFailed. Cancelling one caller leaves the dialling to the others.
        """
        while True:
            known = self._peers.get(peer)
            if self._is_closing:
                raise HandoffFailed(f"no link to {peer} any more: the worker stops")
            if known is None:
                if len(self._peers) >= self._settings.links_max:
                    raise HandoffFailed(f"{len(self._peers)} links are open, no place for one to {peer}")
                known = _Peer(peer, address, asyncio.get_running_loop().create_future())
                self._peers[peer] = known
                known.task = self._tasks.spawn(self._supervise(known), f"kv-link-{peer}")
            if not known.is_ending:
                link = await asyncio.shield(known.ready)
                if link.is_open:
                    return link
            # The plane must have forgotten the peer before it can be connected again.
            await known.gone.wait()

    def used(self, link: Link) -> None:
        """The link's idle time starts anew."""
        if link.is_open:
            self._used_s[link] = self._clock.monotonic()

    async def close_idle(self, now: float, busy: set[Link]) -> None:
        """Says goodbye on the links that have been idle for too long; those in `busy` are in use."""
        for link in self.links:
            if link not in busy and now - self._used_s.setdefault(link, now) >= self._settings.idle_link_s:
                await link.close("idle")

    async def close(self, reason: str) -> None:
        """Says goodbye on every link and gives up those that are still being dialled; the supervising tasks end by themselves."""
        self._is_closing = True
        for peer in self._peers.values():
            if not peer.ready.done() and peer.task is not None:
                # Also for a task that has not had its first step: cancelled, it would never answer those who wait.
                self._fail(peer, HandoffFailed(f"no link to {peer.name}: {reason}"))
                peer.task.cancel()
        async with asyncio.TaskGroup() as group:
            for link in self.links:
                group.create_task(link.close(reason))

    async def _supervise(self, peer: _Peer) -> None:
        link: Link | None = None
        runner: asyncio.Task[str] | None = None
        try:
            link = await dial(peer.address, peer.name, self._identity, self._settings, self._clock)
            # Heartbeats run while the plane connects: that may take longer than a peer may be silent.
            runner = asyncio.create_task(link.run(self._on_message), name=f"kv-link-run-{peer.name}")
            async with asyncio.timeout(self._settings.connect_s):
                await self._plane.connect(peer.name, bytes.fromhex(link.welcome.description))
            if link.close_reason is not None:
                raise HandoffFailed(f"the link to {peer.name} was lost while the data plane connected: {link.close_reason}")
            peer.ready.set_result(link)
            self._count(LINKS_OPENED, 1)
            await runner
        except BatonError as error:
            self._fail(peer, error)
        except TimeoutError:
            self._fail(peer, HandoffFailed(f"the data plane did not connect to {peer.name} in {self._settings.connect_s:g} s"))
        finally:
            peer.is_ending = True
            try:
                await self._end(peer, link, runner)
            finally:
                del self._peers[peer.name]
                peer.gone.set()

    def _fail(self, peer: _Peer, error: BatonError) -> None:
        if not peer.ready.done():
            peer.ready.set_exception(error)
            peer.ready.exception()  # Nobody may be waiting any more; that is no error.
            self._count(LINKS_REFUSED, 1)

    async def _end(self, peer: _Peer, link: Link | None, runner: asyncio.Task[str] | None) -> None:
        self._fail(peer, HandoffFailed(f"the link to {peer.name} is closing"))
        if link is None:
            return
        link.abort("closing")
        if peer.ready.exception() is None:
            self._count(LINKS_LOST, 1)
            self._used_s.pop(link, None)
            self._on_lost(link, link.close_reason or "closing")
        if runner is not None:
            await asyncio.wait({runner}, timeout=self._settings.suspect_s)
        try:
            async with asyncio.timeout(self._settings.quarantine_s):
                await self._plane.disconnect(peer.name)
        except TimeoutError:
            # The slabs of its reads stay in quarantine; their watch turns the worker unhealthy.
            pass
