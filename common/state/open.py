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
        raise ValueError(f"redis_url must start with one of {', '.join((*_REDIS_SCHEMES, 'memory://'))}")
    try:
        return RedisStateStore(url, cluster)
    except ValueError:
        # Neither the message nor the cause: what was taken for a port or a parameter may be a piece of the password.
        raise ValueError(
            "redis_url cannot be read: a wrong port, an unknown parameter, or a password with special characters not percent-encoded"
        ) from None
