"""The sending worker's listening port: accepts, authenticates and runs the control links of receiving workers.

It must not know handoffs; it reports messages and lost links to its owner. Connections, handshakes and links are bounded in
number and time, and a worker (named by its incarnation) has at most one link: a newer one replaces the older.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common import log
from common.clock import Clock
from kvtransfer.counters import LINKS_LOST, LINKS_OPENED, LINKS_REFUSED, Count
from kvtransfer.link import Link
from kvtransfer.link_framing import LinkFault
from kvtransfer.link_handshake import LinkIdentity, accept
from kvtransfer.messages import Message
from kvtransfer.settings import FabricSettings
from kvtransfer.tasks import TaskSet

LOG = log.get_logger("kvtransfer.listener")

_FLUSH_S = 0.2


class LinkListener:
    def __init__(
        self,
        identity: LinkIdentity,
        settings: FabricSettings,
        clock: Clock,
        tasks: TaskSet,
        count: Count,
        *,
        on_message: Callable[[Link, Message], None],
        on_lost: Callable[[Link, str], None],
    ) -> None:
        self.links: dict[str, Link] = {}
        self.last_refusal: str | None = None
        """Why the latest connection was not accepted, for people and tests."""
        self._identity = identity
        self._settings = settings
        self._clock = clock
        self._tasks = tasks
        self._count = count
        self._on_message = on_message
        self._on_lost = on_lost
        self._server: asyncio.Server | None = None
        self._num_handshakes = 0
        self._is_closing = False

    async def start(self, host: str, port: int) -> str:
        """Listens; returns host:port with the port that was bound (0 binds a free one)."""
        self._server = await asyncio.start_server(self._connected, host, port, limit=self._settings.message_bytes_max + 4)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self, reason: str) -> None:
        """Stops listening and says goodbye on every link. Their tasks end by themselves soon after."""
        self._is_closing = True
        if self._server is not None:
            self._server.close()
        async with asyncio.TaskGroup() as group:
            for link in list(self.links.values()):
                group.create_task(link.close(reason))

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closing or self._num_handshakes >= self._settings.handshakes_max:
            self._refused(f"{self._num_handshakes} handshakes are running")
            writer.transport.abort()
            return
        self._num_handshakes += 1
        task = self._tasks.spawn(self._serve(reader, writer), "kv-link-accept")
        # Also for a task that is cancelled before its first step and so never enters its body.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            link = await accept(reader, writer, self._identity, self._settings, self._clock)
        except LinkFault as fault:
            self._refused(fault.reason)
            await _flush(writer)
            return
        finally:
            self._num_handshakes -= 1
        older = self.links.get(link.peer)
        if self._is_closing or (older is None and len(self.links) >= self._settings.links_max):
            self._refused(f"{len(self.links)} links are open")
            await link.close("no place for another link")
            return
        if older is not None:
            older.abort("replaced by a newer link of the same worker")
        self.links[link.peer] = link
        self._count(LINKS_OPENED, 1)
        try:
            await link.run(self._on_message)
        finally:
            if self.links.get(link.peer) is link:
                del self.links[link.peer]
            self._count(LINKS_LOST, 1)
            self._on_lost(link, link.close_reason or "cancelled")

    def _refused(self, reason: str) -> None:
        self.last_refusal = reason
        self._count(LINKS_REFUSED, 1)
        LOG.warn("kv_link_refused", reason=reason)


async def _flush(writer: asyncio.StreamWriter) -> None:
    """Lets the rejection leave, within bounds, and closes the connection."""
    try:
        writer.close()
        async with asyncio.timeout(_FLUSH_S):
            await writer.wait_closed()
    except (TimeoutError, OSError):
        pass
    finally:
        writer.transport.abort()
