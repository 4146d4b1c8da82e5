"""The way of one frame on the receiving end: read it into a slab, scatter it to its blocks, verify what was copied.

It must not know handoff states: it is told where the frame belongs and when to stop, and says how it ended. When `move` has
returned, nothing touches the blocks; the slab is free or in quarantine until its read has settled. Times are seconds.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from common.clock import Clock
from common.errors import BatonError
from kvtransfer.authentication import frame_digest
from kvtransfer.copier import BlockCopier
from kvtransfer.counters import BYTES_RECEIVED, CHECKSUM_FAILED, FRAMES_RECEIVED, Count
from kvtransfer.data_plane import DataPlane, Fetch
from kvtransfer.handoff import Failure
from kvtransfer.link import Link
from kvtransfer.messages import Announce
from kvtransfer.settings import FabricSettings
from kvtransfer.staging import Slab, SlabPool


@dataclass(frozen=True, slots=True)
class Place:
    """Where a handoff's frames belong: the sequence's block table. `stopping` resolves when the handoff has ended early."""

    link: Link
    block_ids: tuple[int, ...]
    stopping: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class Moved:
    """How a frame ended: stored and verified, failed, or (neither) given up because the handoff had ended.

    `is_read_settled` says that the read has settled already and no call of `on_read_settled` will come.
    """

    is_stored: bool = False
    failure: Failure | None = None
    transfer_s: float = 0.0
    scatter_s: float = 0.0
    is_read_settled: bool = True


class FrameMover:
    def __init__(
        self,
        plane: DataPlane,
        copier: BlockCopier,
        slabs: SlabPool,
        copies: ThreadPoolExecutor,
        fingerprint: str,
        settings: FabricSettings,
        clock: Clock,
        count: Count,
    ) -> None:
        self._plane = plane
        self._copier = copier
        self._slabs = slabs
        self._copies = copies
        self._fingerprint = fingerprint
        self._settings = settings
        self._clock = clock
        self._count = count
        self._quarantined: dict[int, tuple[Link, float]] = {}

    def quarantined(self) -> list[tuple[Link, float]]:
        """The links whose abandoned reads still run, each with the time since when."""
        return list(self._quarantined.values())

    async def move(self, place: Place, frame: Announce, slab: Slab, on_read_settled: Callable[[], None]) -> Moved:
        """Takes the slab over. Ends soon after `place.stopping`, and a read within the transfer deadline in any case."""
        try:
            fetch = self._plane.fetch(place.link.peer, frame.offset, slab.offset, frame.num_bytes)
        except BatonError as error:
            self._slabs.release(slab)
            return Moved(failure=Failure("HandoffFailed", f"frame {frame.frame_index} cannot be read: {error.message}"))
        fetch.done.add_done_callback(_see_exception)
        either: set[asyncio.Future[Any]] = {fetch.done, place.stopping}
        try:
            await asyncio.wait(either, timeout=self._settings.transfer_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._put_away(place.link, slab, fetch, on_read_settled)
            raise
        if place.stopping.done():
            return Moved(is_read_settled=self._put_away(place.link, slab, fetch, on_read_settled))
        if not fetch.done.done():
            reason = f"frame {frame.frame_index} of {frame.num_bytes} bytes was not read within {self._settings.transfer_s:g} s"
            settled = self._put_away(place.link, slab, fetch, on_read_settled)
            return Moved(failure=Failure("HandoffFailed", reason), is_read_settled=settled)
        problem = "cancelled" if fetch.done.cancelled() else fetch.done.exception()
        if problem is not None:
            reason = f"frame {frame.frame_index} was not read: {problem}"
            settled = self._put_away(place.link, slab, fetch, on_read_settled)
            return Moved(failure=Failure("HandoffFailed", reason), is_read_settled=settled)
        return await self._store(place, frame, slab, fetch, on_read_settled)

    async def _store(self, place: Place, frame: Announce, slab: Slab, fetch: Fetch, on_read_settled: Callable[[], None]) -> Moved:
        copy = asyncio.get_running_loop().run_in_executor(self._copies, self._scatter, place, frame, slab)
        try:
            scattered = await asyncio.shield(copy)
        except asyncio.CancelledError:
            # Only a close that has already waited cancels frames. The thread may still read the slab: never reuse it.
            self._slabs.quarantine(slab, asyncio.get_running_loop().create_future())
            raise
        except Exception as error:  # The copier is foreign code: whatever it raises ends this handoff, and both ends know.
            settled = self._put_away(place.link, slab, fetch, on_read_settled)
            reason = f"scatter of frame {frame.frame_index} failed: {type(error).__name__}: {error}"
            return Moved(failure=Failure("HandoffFailed", reason), is_read_settled=settled)
        settled = self._put_away(place.link, slab, fetch, on_read_settled)
        if scattered is None:
            return Moved(is_read_settled=settled)
        payload_digest, scatter_s = scattered
        digest = frame_digest(place.link.frame_key, self._fingerprint, frame, payload_digest)
        if not hmac.compare_digest(digest, frame.digest):
            return Moved(failure=self._mismatch(place.link, frame), is_read_settled=settled)
        self._count(FRAMES_RECEIVED, 1)
        self._count(BYTES_RECEIVED, frame.num_bytes)
        return Moved(True, None, fetch.done.result(), scatter_s, settled)

    def _scatter(self, place: Place, frame: Announce, slab: Slab) -> tuple[bytes, float] | None:
        """On the copy thread. None, and no block touched, if the handoff ended while the frame waited for the thread."""
        if place.stopping.done():
            return None
        block_ids = place.block_ids[frame.first_block_index : frame.first_block_index + frame.num_blocks]
        started_s = self._clock.monotonic()
        digest = self._copier.scatter(slab.view[: frame.num_bytes], block_ids)
        return digest, self._clock.monotonic() - started_s

    def _mismatch(self, link: Link, frame: Announce) -> Failure:
        """A sender that lost sight of us reuses its slabs after a while; what we read then is stale, not corrupt."""
        if not link.is_open or link.silence_s >= self._settings.suspect_s:
            return Failure("HandoffFailed", f"frame {frame.frame_index} was read from a lost sender")
        self._count(CHECKSUM_FAILED, 1)
        return Failure("KVCorrupt", f"the checksum of frame {frame.frame_index} ({frame.num_bytes} bytes) does not match")

    def _put_away(self, link: Link, slab: Slab, fetch: Fetch, on_read_settled: Callable[[], None]) -> bool:
        """The slab goes home, now (True) or when its read has settled, which is then reported."""
        if fetch.settled.done():
            self._slabs.release(slab)
            return True
        self._quarantined[slab.index] = (link, self._clock.monotonic())
        self._slabs.quarantine(slab, fetch.settled)

        def settled(_: asyncio.Future[None]) -> None:
            self._quarantined.pop(slab.index, None)
            on_read_settled()

        fetch.settled.add_done_callback(settled)
        return False


def _see_exception(done: asyncio.Future[float]) -> None:
    """An abandoned fetch may fail later; that is expected and not an unseen exception."""
    if not done.cancelled():
        done.exception()
