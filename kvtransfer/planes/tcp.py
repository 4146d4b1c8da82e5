"""The data plane over plain sockets: no dependency, works between any two hosts, and no peer's death can harm this process.

One authenticated connection per peer, opened by the reader. Requests are pipelined and answered in order; bytes go from
the kernel straight into the local region. A connection that breaks fails its fetches and stays broken: the owner of the
control link disconnects and connects again. `host` is both bound and told to peers, so between hosts it is a real address.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections import deque

from common.errors import HandoffFailed
from kvtransfer.data_plane import Fetch
from kvtransfer.planes.description import open_description, plane_key, seal_description
from kvtransfer.planes.fetches import FetchBook, RunningFetch
from kvtransfer.planes.tcp_handshake import LISTENER_ID_BYTES, prove_as_client, receive_exactly, receive_into
from kvtransfer.planes.tcp_server import REPLY, REQUEST, RegionServer, resolve, tune

CONNECT_TIMEOUT_S = 3.0

_FIELDS = struct.Struct(f"!{LISTENER_ID_BYTES}sQH")
"""listener id, bytes of the region, port; then the host name"""


class _Lane:
    """The connection to one peer and the fetches on it, in the order of their requests."""

    def __init__(self, sock: socket.socket, peer: str, region: memoryview, peer_region_bytes: int) -> None:
        self.peer_region_bytes = peer_region_bytes
        self.broken: str | None = None
        self._sock = sock
        self._peer = peer
        self._region = region
        self._requests: asyncio.Queue[tuple[int, RunningFetch]] = asyncio.Queue()
        self._pending: deque[tuple[int, RunningFetch]] = deque()
        self._sequence = 0
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"tcp plane reads from {peer}")
        self.task.add_done_callback(self._ended)

    def add(self, fetch: RunningFetch) -> None:
        self._sequence += 1
        self._pending.append((self._sequence, fetch))
        self._requests.put_nowait((self._sequence, fetch))

    async def cut(self, reason: str) -> None:
        """Fails what runs and closes the connection; needs nothing from the peer."""
        self.broken = self.broken or reason
        for _, fetch in self._pending:
            fetch.fail(HandoffFailed(f"fetch of {fetch.num_bytes} bytes from {self._peer}: {reason}"))
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask())
            group.create_task(self._receive())

    async def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sequence, fetch = await self._requests.get()
            await loop.sock_sendall(self._sock, REQUEST.pack(sequence, fetch.remote_offset, fetch.num_bytes))

    async def _receive(self) -> None:
        while True:
            head = REPLY.unpack(await receive_exactly(self._sock, REPLY.size))
            if not self._pending or head != (self._pending[0][0], self._pending[0][1].num_bytes):
                raise ConnectionError(f"reply {head} answers no request")
            fetch = self._pending[0][1]
            await receive_into(self._sock, self._region[fetch.local_offset : fetch.local_offset + fetch.num_bytes])
            self._pending.popleft()
            fetch.succeed()
            fetch.settle()

    def _ended(self, task: asyncio.Task[None]) -> None:
        # A callback of the task: only now is it certain that no `recv_into` of this connection can run any more.
        self._sock.close()
        if not task.cancelled() and (group := task.exception()) is not None:
            causes = group.exceptions if isinstance(group, BaseExceptionGroup) else (group,)
            self.broken = self.broken or "; ".join(str(cause) for cause in causes)
        reason = self.broken or "the connection was cut"
        for _, fetch in self._pending:
            fetch.fail(HandoffFailed(f"fetch of {fetch.num_bytes} bytes from {self._peer}: {reason}"))
            fetch.settle()
        self._pending.clear()
        self._region = memoryview(b"")


class TcpPlane:
    """A DataPlane over TCP connections."""

    scheme = "tcp"

    def __init__(self, name: str, secret: bytes, host: str = "127.0.0.1") -> None:
        self._name = name
        self._secret = secret
        self._key = plane_key(secret, b"baton-tcp-plane")
        self._listener_id = secrets.token_bytes(LISTENER_ID_BYTES)
        self._host = host
        self._port = 0
        self._region = memoryview(b"")
        self._book = FetchBook(0)
        self._server: RegionServer | None = None
        self._lanes: dict[str, _Lane] = {}
        self._connecting: set[str] = set()

    async def start(self, region: memoryview) -> None:
        if self._server is not None:
            raise HandoffFailed(f"data plane of {self._name} is already started")
        self._region = region.cast("B")
        self._book = FetchBook(region.nbytes)
        self._server = RegionServer(self._key, self._listener_id, self._region)
        try:
            self._port = await self._server.start(self._host)
        except OSError as error:
            self._server = None
            raise HandoffFailed(f"data plane of {self._name} cannot listen on {self._host}: {error}") from error

    def describe(self) -> bytes:
        if self._server is None:
            raise HandoffFailed(f"data plane of {self._name} is not running")
        fields = _FIELDS.pack(self._listener_id, self._book.region_bytes, self._port)
        return seal_description(self.scheme, self._secret, fields + self._host.encode())

    async def connect(self, peer: str, description: bytes) -> None:
        payload = open_description(self.scheme, self._secret, description)
        if len(payload) <= _FIELDS.size:
            raise HandoffFailed(f"description of {peer} has only {len(payload)} bytes of fields")
        listener_id, region_bytes, port = _FIELDS.unpack_from(payload)
        host = payload[_FIELDS.size :].decode()
        if self._server is None:
            raise HandoffFailed(f"data plane of {self._name} is not running")
        if peer in self._lanes or peer in self._connecting:
            raise HandoffFailed(f"peer {peer} is already connected")
        self._connecting.add(peer)
        try:
            sock = await self._open(peer, host, port, listener_id)
            if self._server is None or peer not in self._connecting:
                sock.close()
                raise HandoffFailed(f"peer {peer} was disconnected while it was being connected")
            self._lanes[peer] = _Lane(sock, peer, self._region, region_bytes)
        finally:
            self._connecting.discard(peer)

    def fetch(self, peer: str, remote_offset: int, local_offset: int, num_bytes: int) -> Fetch:
        lane = self._lanes.get(peer)
        if lane is None:
            raise HandoffFailed(f"peer {peer} is not connected")
        if lane.broken is not None:
            raise HandoffFailed(f"the connection to {peer} is broken: {lane.broken}")
        fetch = self._book.open(peer, lane.peer_region_bytes, remote_offset, local_offset, num_bytes)
        lane.add(fetch)
        return fetch.outcome

    async def disconnect(self, peer: str) -> None:
        self._connecting.discard(peer)
        lane = self._lanes.pop(peer, None)
        if lane is not None:
            await lane.cut("disconnected")

    async def close(self) -> None:
        server, self._server = self._server, None
        lanes, self._lanes = list(self._lanes.values()), {}
        await asyncio.gather(*(lane.cut(f"data plane of {self._name} is closed") for lane in lanes))
        if server is not None:
            await server.close()
        self._region = memoryview(b"")

    async def _open(self, peer: str, host: str, port: int, listener_id: bytes) -> socket.socket:
        loop = asyncio.get_running_loop()
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                family, kind, protocol, address = await resolve(host, port)
                sock = socket.socket(family, kind, protocol)
                tune(sock)
                await loop.sock_connect(sock, address)
                await prove_as_client(sock, self._key, listener_id)
                return sock
        except BaseException as error:
            # Cancellation too: whoever leaves here without a connection must not leave its socket behind.
            if sock is not None:
                sock.close()
            if isinstance(error, TimeoutError):
                raise HandoffFailed(f"peer {peer} at {host}:{port} did not answer within {CONNECT_TIMEOUT_S} s") from error
            if isinstance(error, OSError):
                raise HandoffFailed(f"cannot connect to {peer} at {host}:{port}: {error}") from error
            raise
