"""The data plane inside one process: a memory copy between two regions. For tests, simulation and the all-in-one mode.

It owns the process-wide table of started regions, which is what an address space is to the other planes. Copies run on
the event loop in steps of at most STEP_BYTES, so that a large fetch does not hold up the loop and can be cut short.
"""

from __future__ import annotations

import asyncio
import os
import struct
import uuid

from common.errors import HandoffFailed
from kvtransfer.data_plane import Fetch
from kvtransfer.planes.description import open_description, seal_description
from kvtransfer.planes.fetches import FetchBook, RunningFetch

STEP_BYTES = 1 << 20
"""About 0.1 ms of copying between two turns of the event loop."""

_FIELDS = struct.Struct("!16sQQ")
"""key of the region, its bytes, process id"""
_regions: dict[bytes, memoryview] = {}


class InprocPlane:
    """A DataPlane whose peers live in the same process and event loop."""

    scheme = "inproc"

    def __init__(self, name: str, secret: bytes) -> None:
        self._name = name
        self._secret = secret
        self._key = uuid.uuid4().bytes
        self._book = FetchBook(0)
        self._peers: dict[str, tuple[bytes, int]] = {}
        self._copies: dict[RunningFetch, asyncio.Task[None]] = {}

    async def start(self, region: memoryview) -> None:
        if self._key in _regions:
            raise HandoffFailed(f"data plane of {self._name} is already started")
        self._book = FetchBook(region.nbytes)
        _regions[self._key] = region.cast("B")

    def describe(self) -> bytes:
        if self._key not in _regions:
            raise HandoffFailed(f"data plane of {self._name} is not running")
        return seal_description(self.scheme, self._secret, _FIELDS.pack(self._key, self._book.region_bytes, os.getpid()))

    async def connect(self, peer: str, description: bytes) -> None:
        payload = open_description(self.scheme, self._secret, description)
        if len(payload) != _FIELDS.size:
            raise HandoffFailed(f"description of {peer} has {len(payload)} bytes of fields, expected {_FIELDS.size}")
        key, region_bytes, process_id = _FIELDS.unpack(payload)
        if self._key not in _regions:
            raise HandoffFailed(f"data plane of {self._name} is not running")
        if peer in self._peers:
            raise HandoffFailed(f"peer {peer} is already connected")
        if process_id != os.getpid():
            raise HandoffFailed(
                f"peer {peer} lives in process {process_id}; the inproc plane reaches only its own, {os.getpid()}"
            )
        if key not in _regions:
            raise HandoffFailed(f"peer {peer} has closed its data plane")
        self._peers[peer] = (key, region_bytes)

    def fetch(self, peer: str, remote_offset: int, local_offset: int, num_bytes: int) -> Fetch:
        known = self._peers.get(peer)
        if known is None or self._key not in _regions:
            raise HandoffFailed(f"peer {peer} is not connected")
        key, region_bytes = known
        fetch = self._book.open(peer, region_bytes, remote_offset, local_offset, num_bytes)
        copy = asyncio.get_running_loop().create_task(self._copy(fetch, key), name=f"inproc fetch from {peer}")
        self._copies[fetch] = copy
        copy.add_done_callback(lambda task: self._ended(fetch, task))
        return fetch.outcome

    async def disconnect(self, peer: str) -> None:
        if self._peers.pop(peer, None) is not None:
            await self._cut(self._book.of_peer(peer), f"disconnected from {peer}")

    async def close(self) -> None:
        _regions.pop(self._key, None)
        self._peers.clear()
        await self._cut(list(self._book.running), f"data plane of {self._name} is closed")

    async def _copy(self, fetch: RunningFetch, key: bytes) -> None:
        for at in range(0, fetch.num_bytes, STEP_BYTES):
            source, target = _regions.get(key), _regions.get(self._key)
            if source is None or target is None:
                raise HandoffFailed(f"peer {fetch.peer} closed its data plane during a fetch")
            size = min(STEP_BYTES, fetch.num_bytes - at)
            start, end = fetch.remote_offset + at, fetch.local_offset + at
            target[end : end + size] = source[start : start + size]
            await asyncio.sleep(0)

    async def _cut(self, fetches: list[RunningFetch], reason: str) -> None:
        copies = [self._copies[fetch] for fetch in fetches]
        for fetch, copy in zip(fetches, copies, strict=True):
            fetch.fail(HandoffFailed(f"fetch of {fetch.num_bytes} bytes: {reason}"))
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)

    def _ended(self, fetch: RunningFetch, copy: asyncio.Task[None]) -> None:
        # Runs as a callback of the task, because a task that is cancelled before its first step never enters its body.
        del self._copies[fetch]
        if copy.cancelled():
            fetch.fail(HandoffFailed(f"fetch of {fetch.num_bytes} bytes from {fetch.peer} was cut short"))
        elif (error := copy.exception()) is not None:
            fetch.fail(error if isinstance(error, HandoffFailed) else HandoffFailed(f"copy from {fetch.peer} failed: {error!r}"))
        else:
            fetch.succeed()
        fetch.settle()
