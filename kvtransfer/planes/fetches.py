"""The running fetches of one data plane: range checks, the bound on their number, and the order of the two futures.

A RunningFetch is the plane's side of a Fetch. `done` may already be cancelled by an impatient caller (`wait_for` does
that), which changes nothing here: the fetch counts as running until the plane calls `settle`, in the event loop thread.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from common.errors import HandoffFailed
from kvtransfer.data_plane import Fetch

FETCHES_MAX = 1024
"""Fetches of one plane that have not settled. Callers are bounded by slabs far below; this bound catches a leak."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningFetch:
    """One read from a peer's region into ours, all numbers in bytes; `started_s` is the loop's monotonic time."""

    book: FetchBook
    peer: str
    remote_offset: int
    local_offset: int
    num_bytes: int
    started_s: float
    outcome: Fetch

    def succeed(self) -> None:
        if not self.outcome.done.done():
            self.outcome.done.set_result(self.outcome.done.get_loop().time() - self.started_s)

    def fail(self, error: HandoffFailed) -> None:
        if not self.outcome.done.done():
            self.outcome.done.set_exception(error)

    def settle(self) -> None:
        """The local memory is not touched any more. The outcome comes first, always."""
        assert self.outcome.done.done(), "a fetch cannot settle before it has an outcome"
        self.book.running.discard(self)
        if not self.outcome.settled.done():
            self.outcome.settled.set_result(None)


class FetchBook:
    """All fetches of one plane that have not settled."""

    def __init__(self, region_bytes: int) -> None:
        self.region_bytes = region_bytes
        self.running: set[RunningFetch] = set()

    def open(self, peer: str, peer_region_bytes: int, remote_offset: int, local_offset: int, num_bytes: int) -> RunningFetch:
        """Books a fetch that the plane is about to start. Raises HandoffFailed for a range outside a region."""
        if num_bytes < 1:
            raise HandoffFailed(f"fetch of {num_bytes} bytes from {peer}: at least 1 is needed")
        for side, offset, size in (("peer's", remote_offset, peer_region_bytes), ("own", local_offset, self.region_bytes)):
            if offset < 0 or offset + num_bytes > size:
                raise HandoffFailed(
                    f"fetch from {peer}: bytes {offset}..{offset + num_bytes} lie outside of the {side} region of {size} bytes"
                )
        if len(self.running) >= FETCHES_MAX:
            raise HandoffFailed(f"fetch from {peer}: {len(self.running)} fetches have not settled, the bound is {FETCHES_MAX}")
        loop = asyncio.get_running_loop()
        outcome = Fetch(done=loop.create_future(), settled=loop.create_future())
        # An abandoned fetch has nobody who looks at its error; that is allowed, so the loop must not complain about it.
        outcome.done.add_done_callback(_mark_seen)
        fetch = RunningFetch(self, peer, remote_offset, local_offset, num_bytes, loop.time(), outcome)
        self.running.add(fetch)
        return fetch

    def of_peer(self, peer: str) -> list[RunningFetch]:
        return [fetch for fetch in self.running if fetch.peer == peer]


def _mark_seen(future: asyncio.Future[float]) -> None:
    if not future.cancelled():
        future.exception()
