"""The passive half of the tcp plane: serves reads of one region to authenticated connections.

Each connection is one task that answers requests in order, straight from the region by `sendmsg`. Connections, the time
for a handshake and the time without progress are bounded; a request outside of the region ends its connection.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from functools import partial
from typing import Any

from common import log
from kvtransfer.planes.tcp_handshake import prove_as_server, receive_exactly

CONNECTIONS_MAX = 256
"""Peers of one worker, authenticated or not yet; one more is closed at once."""
HANDSHAKE_TIMEOUT_S = 2.0
STALL_TIMEOUT_MS = 15_000
"""A connection whose other end takes no byte for so long is dropped by the kernel (TCP_USER_TIMEOUT)."""

REQUEST = struct.Struct("!QQQ")
"""sequence number, offset, number of bytes"""
REPLY = struct.Struct("!QQ")
"""sequence number, number of bytes; then the bytes"""

LOG = log.get_logger("kvtransfer.tcp")


async def resolve(host: str, port: int) -> tuple[int, int, int, tuple[Any, ...]]:
    """Family, type, protocol and address of a listener. A numeric host needs no look-up and so no thread of the loop."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    return family, kind, protocol, address


def tune(sock: socket.socket) -> None:
    """Both ends: requests are tiny and must not wait; a vanished host must not hold a connection for ever."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALL_TIMEOUT_MS)


class RegionServer:
    """Listens from `start` to `close`. `counts` tells how connections ended, by reason."""

    def __init__(self, key: bytes, listener_id: bytes, region: memoryview) -> None:
        self._key = key
        self._listener_id = listener_id
        self._region = region
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()

    async def start(self, host: str) -> int:
        """Binds a free port of `host` and returns it. Raises OSError."""
        loop = asyncio.get_running_loop()
        family, kind, protocol, address = await resolve(host, 0)
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(CONNECTIONS_MAX)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._accepting = loop.create_task(self._accept(listener), name="tcp plane listener")
        return int(listener.getsockname()[1])

    async def close(self) -> None:
        tasks = [task for task in (self._accepting, *self._serving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        self._region = memoryview(b"")

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Out of descriptors or a connection that was reset in the queue: later ones may succeed.
                LOG.warn("tcp_accept_failed", error=str(error))
                await asyncio.sleep(0.1)
                continue
            if len(self._serving) >= CONNECTIONS_MAX:
                sock.close()
                self.counts["refused_full"] += 1
                continue
            task = loop.create_task(self._serve(sock), name="tcp plane connection")
            self._serving.add(task)
            task.add_done_callback(partial(self._ended, sock))

    def _ended(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        # A callback, because a task that is cancelled before its first step never enters its body.
        self._serving.discard(task)
        sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        try:
            tune(sock)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await prove_as_server(sock, self._key, self._listener_id)
            while True:
                sequence, offset, num_bytes = REQUEST.unpack(await receive_exactly(sock, REQUEST.size))
                if not 0 < num_bytes <= self._region.nbytes - offset:
                    self.counts["range_error"] += 1
                    LOG.error("tcp_request_outside_region", num_bytes=num_bytes, offset=offset)
                    return
                await _send_two(sock, REPLY.pack(sequence, num_bytes), self._region[offset : offset + num_bytes])
        except PermissionError as error:
            self.counts["refused_proof"] += 1
            LOG.warn("tcp_connection_refused", reason=str(error))
        except TimeoutError:
            self.counts["timed_out"] += 1
        except OSError:
            self.counts["ended"] += 1


async def _send_two(sock: socket.socket, head: bytes, body: memoryview) -> None:
    """One system call for both where the socket has room, without joining them in memory."""
    loop = asyncio.get_running_loop()
    try:
        sent = sock.sendmsg([head, body])
    except (BlockingIOError, InterruptedError):
        sent = 0
    if sent < len(head):
        await loop.sock_sendall(sock, head[sent:])
        sent = len(head)
    if sent < len(head) + len(body):
        await loop.sock_sendall(sock, body[sent - len(head) :])
