"""Leases: a promise that ends by itself when nothing is heard of its key for its duration.

It must not know clocks, sockets or handoffs; every call takes `now` in monotonic seconds, and a shell calls `expired` on
its own timer, whether or not any other work arrives. States: granted, renewed, expired or dropped.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key")

EXPIRIES_PER_SWEEP_MAX = 256
"""What a shell asks `expired` for at once, so that one sweep is short; the next one takes the rest."""
_STALE_ENTRIES_MIN = 64


@dataclass(frozen=True, slots=True)
class _Lease:
    serial: int
    duration_s: float
    expires_s: float


class LeaseTable(Generic[Key]):
    """Grant, renew and drop are O(log n) or better; `expired` does bounded work per call."""

    def __init__(self) -> None:
        self._leases: dict[Key, _Lease] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: Key) -> bool:
        return key in self._leases

    def grant(self, key: Key, now: float, duration_s: float) -> None:
        """Starts a lease, or replaces the key's lease by one with another duration."""
        if duration_s <= 0:
            raise ValueError(f"a lease needs a positive duration, got {duration_s} s")
        self._serial += 1
        self._leases[key] = _Lease(self._serial, duration_s, now + duration_s)
        heapq.heappush(self._heap, (now + duration_s, self._serial, key))
        if len(self._heap) > 2 * len(self._leases) + _STALE_ENTRIES_MIN:
            self._heap = [(lease.expires_s, lease.serial, name) for name, lease in self._leases.items()]
            heapq.heapify(self._heap)

    def renew(self, key: Key, now: float) -> bool:
        """Pushes the end out to `now` + duration. False if there is no such lease: an expired one is never revived."""
        lease = self._leases.get(key)
        if lease is None or lease.expires_s <= now:
            return False
        self._leases[key] = _Lease(lease.serial, lease.duration_s, now + lease.duration_s)
        return True

    def drop(self, key: Key) -> bool:
        """Ends a lease without expiry. False if there is none."""
        return self._leases.pop(key, None) is not None

    def expired(self, now: float, num_max: int) -> list[Key]:
        """Removes and returns at most `num_max` keys whose lease ended at or before `now`, the earliest first."""
        ended: list[Key] = []
        while self._heap and self._heap[0][0] <= now and len(ended) < num_max:
            _, serial, key = heapq.heappop(self._heap)
            lease = self._leases.get(key)
            if lease is None or lease.serial != serial:
                continue
            if lease.expires_s > now:
                heapq.heappush(self._heap, (lease.expires_s, serial, key))
                continue
            del self._leases[key]
            ended.append(key)
        return ended
