"""One URL, one store: `memory://` for a single process, everything else is a Redis URL."""

from __future__ import annotations

from common.clock import SystemClock
from common.state.memory import MemoryStateStore
from common.state.redis import RedisStateStore
from common.state.store import StateStore

_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


def open_store(url: str, cluster: str) -> StateStore:
    """Opens nothing yet: `start` the result. Raises ValueError naming the schemes for any other URL."""
    if url == "memory://":
        return MemoryStateStore(SystemClock())
    if not url.startswith(_REDIS_SCHEMES):
        raise ValueError(
            f"redis_url {url.partition('@')[2] or url!r} must start with one of {', '.join((*_REDIS_SCHEMES, 'memory://'))}"
        )
    return RedisStateStore(url, cluster)
