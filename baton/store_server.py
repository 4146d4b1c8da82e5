"""The state store of one `baton up`: the server behind a given URL, or an embedded one that lives and ends with it.

A given server is only asked whether it answers, a few times with growing waits; the embedded one is a plain child process
that the kernel ends with `baton up`. Nothing here reads or writes keys.
"""

from __future__ import annotations

import asyncio

from common.redis_server import EmbeddedRedis
from common.state.open import open_store

PING_WAITS_S = (0.2, 0.5, 1.0, 2.0, 4.0)


class StoreFailed(Exception):
    """A line for the user."""


class StoreServer:
    """`start` once, `stop` in any case."""

    def __init__(self, redis_url: str) -> None:
        self.url = redis_url
        self._embedded: EmbeddedRedis | None = None

    def describe(self) -> str:
        return "embedded server" if self._embedded is not None else "the given Redis answers"

    async def start(self) -> None:
        """Starts the embedded server, or waits until the given one answers. Raises StoreFailed."""
        if self.url:
            await self._wait_for_answer()
            return
        embedded = EmbeddedRedis()
        try:
            embedded.start()  # on this thread: the kernel ties the server's life to the thread that starts it; takes some 0.1 s
        except (OSError, RuntimeError) as error:
            raise StoreFailed(f"the embedded store does not start: {error}; give a running one with --redis-url") from error
        self._embedded = embedded
        self.url = embedded.url

    async def _wait_for_answer(self) -> None:
        for wait_s in (0.0, *PING_WAITS_S):
            await asyncio.sleep(wait_s)
            store = open_store(self.url, "ping")
            try:
                await store.start()
                if await store.ping():
                    return
            finally:
                await store.close()
        raise StoreFailed(f"the store given by --redis-url or REDIS_URL did not answer within {sum(PING_WAITS_S):.0f} s")

    def stop(self) -> None:
        """Ends the embedded server and removes its files; a given server is left alone. Idempotent."""
        if self._embedded is not None:
            self._embedded.stop()
            self._embedded = None
