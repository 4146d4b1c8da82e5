"""How many requests this router serves at once, and how fast it says no to the rest.

Owns one bounded count; a request either gets a permit at once or is refused with a hint when to come back. Pure: no clock of
its own (`now` is monotonic seconds), no waiting, no I/O; a permit is returned exactly once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from common.errors import Draining, Overloaded

_ENDED_WINDOW = 64
RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 30.0


@dataclass(slots=True)
class Permit:
    """The right of one request to be served. `release` is idempotent, so every path of a request may call it."""

    _owner: Admission
    _is_released: bool = False

    def release(self, now: float) -> None:
        if not self._is_released:
            self._is_released = True
            self._owner._returned(now)


@dataclass(slots=True)
class Admission:
    """Try-acquire over `requests_max` permits.

    The Retry-After hint is the mean time between recent ends of requests (a slot becomes free about that often), rounded
    into [1, 30] seconds: a client that waits that long has a fair chance, and a fleet that is stuck is not hammered.
    """

    requests_max: int
    num_active: int = 0
    num_refused: int = 0
    is_draining: bool = False
    _ended_at: deque[float] = field(default_factory=lambda: deque(maxlen=_ENDED_WINDOW))

    def check(self, now: float, count: int = 1) -> None:
        """Raises what taking `count` permits would raise now; takes nothing."""
        if self.is_draining:
            self.num_refused += 1
            raise Draining("the router is shutting down", retry_after_s=RETRY_AFTER_MIN_S)
        if self.num_active + count > self.requests_max:
            self.num_refused += 1
            raise Overloaded(
                f"{self.num_active} requests are being served, the limit is {self.requests_max}",
                retry_after_s=self.retry_after_s(now),
                code="overloaded",
            )

    def try_acquire(self, now: float) -> Permit:
        """A permit, or raises Draining / Overloaded with `retry_after_s`."""
        self.check(now)
        self.num_active += 1
        return Permit(self)

    def try_acquire_many(self, now: float, count: int) -> list[Permit]:
        """`count` permits or none of them."""
        self.check(now, count)
        return [self.try_acquire(now) for _ in range(count)]

    def retry_after_s(self, now: float) -> float:
        if len(self._ended_at) < 2:
            return RETRY_AFTER_MIN_S
        between_s = (now - self._ended_at[0]) / len(self._ended_at)
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, between_s))

    def _returned(self, now: float) -> None:
        assert self.num_active > 0, "a permit was returned that nobody holds"
        self.num_active -= 1
        self._ended_at.append(now)
