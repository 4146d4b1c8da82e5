"""The data plane seam: move one contiguous slab from a peer's registered region into one of ours. One-sided, pull only.

Three implementations (`planes/inproc`, `planes/tcp`, `planes/ucx`) pass one conformance suite. A plane knows bytes and
offsets inside two registered regions, nothing of blocks, handoffs or epochs. Peers are named by an opaque string that
contains the peer's incarnation, so a restarted peer is another peer.

An operation cannot be cancelled. A caller that stops waiting *abandons* its Fetch: the local slab stays in quarantine until
`settled` resolves, which says that the plane will not touch that memory any more.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Fetch:
    """A running read. `done` resolves to the seconds the bytes took, or raises HandoffFailed.

    `settled` always resolves, with None, when the local memory is no longer touched; never before `done` has an outcome.
    Both belong to the event loop that started the fetch.
    """

    done: asyncio.Future[float]
    settled: asyncio.Future[None]


class DataPlane(Protocol):
    scheme: str

    async def start(self, region: memoryview) -> None:
        """Registers the one region of this process (all slabs, writable, never unmapped before `close` has settled)."""
        ...

    def describe(self) -> bytes:
        """What a peer needs in order to read from our region: opaque bytes, at most 64 KiB, carried by the control link."""
        ...

    async def connect(self, peer: str, description: bytes) -> None:
        """Makes a peer's region readable under this name. Raises HandoffFailed; connecting a known peer is an error."""
        ...

    def fetch(self, peer: str, remote_offset: int, local_offset: int, num_bytes: int) -> Fetch:
        """Starts reading `num_bytes` from the peer's region into ours. Never blocks. Raises HandoffFailed if the peer is
        unknown or a range lies outside a region."""
        ...

    async def disconnect(self, peer: str) -> None:
        """Forgets a peer; running fetches from it fail soon. Idempotent. Waits for nothing that only the peer can end."""
        ...

    async def close(self) -> None:
        """Ends every fetch and frees what the plane owns; bounded in time."""
        ...
