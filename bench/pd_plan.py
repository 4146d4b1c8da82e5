"""What `bench.pd` runs: the workloads, the order of the sides in each round, and the seeds. Pure.

A side is one server under test, ours or a peer, known here by name only. Rounds count from 0; prompts are counted in tokens, rates in
requests per second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.bench_arrivals import RequestClass


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` clients with one request each until `requests` were answered."""

    name: str
    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Poisson arrivals of several classes for `duration_s` seconds, each class reported apart."""

    name: str
    classes: tuple[RequestClass, ...]
    duration_s: float


@dataclass(frozen=True, slots=True)
class Handover:
    """Long prompts one at a time through prefill and decode; read from our own timeline, so only our disaggregated side has it."""

    name: str
    prompt_tokens: int
    repeats: int


Workload = ClosedLoop | OpenLoop | Handover


def all_workloads(chat_rate_per_s: float = 0.7, long_rate_per_s: float = 0.15, mixed_s: float = 60.0) -> list[Workload]:
    """The whole suite in the order in which a side runs it."""
    classes = (RequestClass("chat", chat_rate_per_s, 100, 64), RequestClass("long", long_rate_per_s, 1500, 8))
    return [
        ClosedLoop("c1", 1, 6, 128, 64),
        ClosedLoop("c4", 4, 16, 128, 64),
        ClosedLoop("c16", 16, 48, 128, 64),
        ClosedLoop("prefill128", 1, 8, 128, 8),
        ClosedLoop("prefill1024", 1, 5, 1024, 8),
        OpenLoop("mixed", classes, mixed_s),
        Handover("handover", 1500, 7),
    ]


def quick(workload: Workload) -> Workload:
    """The same path with a few small requests: proves that it works, measures nothing."""
    if isinstance(workload, ClosedLoop):
        return replace(
            workload,
            requests=min(workload.requests, max(2, workload.concurrency)),
            prompt_tokens=min(workload.prompt_tokens, 160),
            output_tokens=4,
        )
    if isinstance(workload, OpenLoop):
        classes = tuple(
            replace(one, rate_per_s=1.5, prompt_tokens=min(one.prompt_tokens, 160), output_tokens=4) for one in workload.classes
        )
        return replace(workload, classes=classes, duration_s=4.0)
    return replace(workload, prompt_tokens=300, repeats=2)


def order(sides: Sequence[str], round_index: int) -> list[str]:
    """Who runs when in this round: each round starts with another side, every second round goes backwards.

    So no side always follows the same neighbour or always has the machine at the same time of the round.
    """
    start = round_index % len(sides)
    turned = [*sides[start:], *sides[:start]]
    return turned if round_index % 2 == 0 else [turned[0], *reversed(turned[1:])]


def seed_of(base: int, round_index: int, workload: str) -> int:
    """One seed for all sides of a round, so that they get the same prompts, and another in each round and workload.

    Servers keep their prefix caches from round to round: the same prompts again would be answered from there.
    """
    digest = hashlib.sha256(f"{base}/{round_index}/{workload}".encode()).digest()
    return int.from_bytes(digest[:6], "big")
