"""When requests of an open loop are due: independent Poisson streams, one per class of request. Pure.

An open loop sends when a request is due, whether or not earlier ones were answered, so a slow server meets the queue that it would meet
in service. Times are seconds from the start of the run; rates are requests per second.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests of one kind, reported apart under `label`."""

    label: str
    rate_per_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of an open loop."""

    due_s: float
    label: str
    prompt_tokens: int
    output_tokens: int


def poisson_arrivals(seed: int, classes: Sequence[RequestClass], duration_s: float) -> list[Arrival]:
    """All arrivals before `duration_s` in the order in which they are due; a pure function of the arguments.

    Each class has a generator of its own, so a change of one class leaves the arrivals of the others as they were.
    Raises ValueError for a rate or duration that is not positive.
    """
    if duration_s <= 0:
        raise ValueError(f"a run of {duration_s:g} s has no arrivals")
    arrivals: list[Arrival] = []
    for one in classes:
        if one.rate_per_s <= 0:
            raise ValueError(f"class {one.label!r}: {one.rate_per_s:g} requests per second never arrive")
        generator = random.Random(f"{seed} {one.label}")
        due_s = generator.expovariate(one.rate_per_s)
        while due_s < duration_s:
            arrivals.append(Arrival(due_s, one.label, one.prompt_tokens, one.output_tokens))
            due_s += generator.expovariate(one.rate_per_s)
    return sorted(arrivals, key=lambda arrival: (arrival.due_s, arrival.label))
