"""Keeps this worker's record in the store: a heartbeat with load and block ownership, and its removal at the end.

A store that is away changes nothing for the worker but a metric and one log line per outage: the record is written again
when it returns. A record that belongs to a newer incarnation means that this process was replaced: `on_superseded` is told once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common import log
from common.errors import StoreUnavailable
from common.state.store import StateStore
from common.types import BlockCensus, WorkerInfo

LOG = log.get_logger("worker.registration")


class Registration:
    def __init__(
        self,
        store: StateStore,
        *,
        describe: Callable[[], tuple[WorkerInfo, BlockCensus]],
        heartbeat_s: float,
        ttl_s: float,
        on_superseded: Callable[[], None],
        on_store_error: Callable[[], None],
    ) -> None:
        self._store = store
        self._describe = describe
        self._heartbeat_s = heartbeat_s
        self._ttl_s = ttl_s
        self._on_superseded = on_superseded
        self._on_store_error = on_store_error
        self._is_store_away = False
        self._publish_now = asyncio.Event()

    def publish_soon(self) -> None:
        """The record changed (state): do not wait for the next beat."""
        self._publish_now.set()

    async def run(self) -> None:
        """Publishes until cancelled or superseded."""
        while True:
            self._publish_now.clear()
            if not await self._publish():
                self._on_superseded()
                return
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._publish_now.wait()
            except TimeoutError:
                pass

    async def _publish(self) -> bool:
        info, census = self._describe()
        try:
            accepted = await self._store.publish_worker(info, census, self._ttl_s)
        except StoreUnavailable as error:
            self._on_store_error()
            if not self._is_store_away:
                LOG.warn("store_away", error=error.message)
            self._is_store_away = True
            return True
        if self._is_store_away:
            LOG.event("store_back")
            self._is_store_away = False
        return accepted

    async def remove(self) -> None:
        """Takes the record away; a store that does not answer is left to the record's TTL."""
        info, _ = self._describe()
        try:
            await self._store.remove_worker(info.worker_id, info.incarnation)
        except StoreUnavailable as error:
            LOG.warn("worker_record_left_to_ttl", error=error.message, ttl_s=self._ttl_s)
