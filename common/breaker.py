"""A circuit breaker for one peer: after several failures in a row it is left alone for a while, then probed by one call.

Pure: takes `now` (monotonic seconds), keeps three states (closed, open, half open) and nothing of the peer. Only faults of the peer may be
reported as failures; a refusal such as Overloaded or a client's cancellation is a healthy answer and must be a success, or
overload would look like an outage.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """Opens after `failures_max` failures in a row, for `open_s` seconds; each failed probe doubles that up to `open_max_s`.

    A probe that is never reported back (its caller was cancelled) counts as lost after `probe_timeout_s`.
    """

    failures_max: int = 3
    open_s: float = 1.0
    open_max_s: float = 30.0
    probe_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if self.failures_max < 1:
            raise ValueError(f"failures_max {self.failures_max} must be at least 1")
        if not 0 < self.open_s <= self.open_max_s:
            raise ValueError(f"open_s {self.open_s} must be above 0 and at most open_max_s {self.open_max_s}")
        if self.probe_timeout_s <= 0:
            raise ValueError(f"probe_timeout_s {self.probe_timeout_s} must be above 0")


class Breaker:
    """`try_acquire` before each call, then exactly one of `succeeded`, `failed` or `abandoned`."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self._num_failures = 0
        self._open_s = policy.open_s
        self._open_until_s: float | None = None
        self._probe_until_s: float | None = None

    def state(self, now: float) -> BreakerState:
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until_s else BreakerState.HALF_OPEN

    def is_available(self, now: float) -> bool:
        """Whether `try_acquire` would say yes; changes nothing, so that a placement may look at every worker."""
        state = self.state(now)
        if state is BreakerState.HALF_OPEN:
            return self._probe_until_s is None or now >= self._probe_until_s
        return state is BreakerState.CLOSED

    def try_acquire(self, now: float) -> bool:
        """True if a call may go out now. When half open, one call at a time: the probe."""
        if not self.is_available(now):
            return False
        if self._open_until_s is not None:
            self._probe_until_s = now + self._policy.probe_timeout_s
        return True

    def succeeded(self) -> None:
        """The peer answered, if only with a refusal. Closes the breaker."""
        self._num_failures = 0
        self._open_s = self._policy.open_s
        self._open_until_s = None
        self._probe_until_s = None

    def failed(self, now: float) -> None:
        """The peer did not answer or broke. While open, failures of calls that went out earlier add nothing."""
        if self._open_until_s is None:
            self._num_failures += 1
            if self._num_failures >= self._policy.failures_max:
                self._open_until_s = now + self._open_s
        elif self._probe_until_s is not None:
            self._open_s = min(self._open_s * 2, self._policy.open_max_s)
            self._open_until_s = now + self._open_s
            self._probe_until_s = None

    def abandoned(self) -> None:
        """The call ended without a verdict on the peer (cancelled by our own client); a probe's place is free again."""
        self._probe_until_s = None
