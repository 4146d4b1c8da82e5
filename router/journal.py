"""Writes the request journal behind the requests' backs: never per token, never in a task that a client can cancel.

Owns a bounded map of entries to write (a newer state of the same request replaces the older one) and the one task that writes them.
A store that is away costs dropped entries, counted, and nothing else; times are wall seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from common.clock import Clock
from common.errors import StoreUnavailable
from common.ids import RequestId
from common.state.store import JournalEntry, StateStore

FINAL_STATES = frozenset({"finished", "failed", "cancelled"})


class Journal:
    """`put` is synchronous and never fails; `run` is the writer task; `close` waits, bounded, for what is still queued."""

    def __init__(
        self, store: StateStore, clock: Clock, *, ttl_s: float, entries_max: int, on_dropped: Callable[[int], None]
    ) -> None:
        self._store = store
        self._clock = clock
        self._ttl_s = ttl_s
        self._entries_max = entries_max
        self._on_dropped = on_dropped
        self._waiting: dict[RequestId, JournalEntry] = {}
        self._wake = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def put(self, entry: JournalEntry) -> None:
        """Queues the newest state of a request. A full queue drops the oldest entry and counts it."""
        entry = replace(entry, updated_wall_s=self._clock.wall())
        if entry.request_id not in self._waiting and len(self._waiting) >= self._entries_max:
            self._waiting.pop(next(iter(self._waiting)))
            self._on_dropped(1)
        self._waiting[entry.request_id] = entry
        self._is_idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._wake.wait()
            while self._waiting:
                entry = self._waiting.pop(next(iter(self._waiting)))
                try:
                    await self._store.write_journal(entry, self._ttl_s)
                except StoreUnavailable:
                    self._on_dropped(1)
            self._wake.clear()
            self._is_idle.set()

    async def flush(self, timeout_s: float) -> bool:
        """Waits until everything queued is written; False when that took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True
