"""Waits between tries: growing, jittered, bounded in count and in time.

Pure: it says how long to wait and when to give up, and never sleeps or looks at a clock. The caller owns the reason to retry and passes
`now` (monotonic seconds) and the random generator. Full jitter over the upper half keeps many callers from marching in step
(M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    """`first_s` before the first retry, then times `factor` up to `wait_max_s`. Give up after `tries_max` waits or `total_max_s`.

    None switches a bound off: for connections that are kept up as long as the process lives.
    """

    first_s: float = 0.1
    factor: float = 2.0
    wait_max_s: float = 2.0
    tries_max: int | None = 5
    total_max_s: float | None = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.wait_max_s:
            raise ValueError(f"first_s {self.first_s} must be above 0 and at most wait_max_s {self.wait_max_s}")
        if self.factor < 1:
            raise ValueError(f"factor {self.factor} must be at least 1: waits never shrink")


class Backoff:
    """One series of tries. `next_wait_s` after each failure, `reset` after a success."""

    def __init__(self, policy: BackoffPolicy, random: Random, now: float) -> None:
        self._policy = policy
        self._random = random
        self._started_s = now
        self._upper_s = policy.first_s
        self.num_waits = 0

    def next_wait_s(self, now: float) -> float | None:
        """Seconds to wait before the next try, within (half, full] of the current step; None means: give up.

        A wait never reaches over `total_max_s`: the last one is cut so that one more try happens before the end.
        """
        policy = self._policy
        if policy.tries_max is not None and self.num_waits >= policy.tries_max:
            return None
        wait_s = self._upper_s * (1.0 - self._random.random() / 2)
        if policy.total_max_s is not None:
            left_s = self._started_s + policy.total_max_s - now
            if left_s <= 0:
                return None
            wait_s = min(wait_s, left_s)
        self.num_waits += 1
        self._upper_s = min(self._upper_s * policy.factor, policy.wait_max_s)
        return wait_s

    def reset(self, now: float) -> None:
        """A try succeeded: the next failure starts a new series."""
        self._started_s = now
        self._upper_s = self._policy.first_s
        self.num_waits = 0
