"""Time as a seam. Pure modules take `now` (monotonic seconds) as an argument; shells own a Clock and pass it on.

Leases and deadlines use monotonic time only, so a wall-clock jump has no effect on them. Wall time is for people.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds from an arbitrary origin; never goes backwards. The same origin for all processes of one host."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch, for logs and people."""
        ...


class SystemClock:
    """The operating system's clocks. CLOCK_MONOTONIC is shared by the processes of one Linux host."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class FakeClock:
    """A clock that moves only when told to; for tests and simulation."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back ({seconds} s)")
        self.now += seconds
        return self.now
