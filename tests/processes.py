"""Which processes a test has left behind: other tests' fleets may live beside it, so only a difference says anything."""

from __future__ import annotations

import psutil


def live_children() -> set[int]:
    """Process ids of everything below this process that runs (zombies do not)."""
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}
