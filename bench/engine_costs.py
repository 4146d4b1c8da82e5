"""What one step costs in the pure half of the engine: scheduler, step builder, allocator, prefix index and event building.

Runs real schedulers over invented prompts, without a model: microseconds per step against running sequences and context length, and
per admission against the waiting line and the sharers of a prefix. Medians over rounds, in CPU time of the one thread: neighbours on
the machine lengthen it less than wall time. CI asserts counts (tests/unit/engine/test_step_costs.py) and never these.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from common.ids import AttemptKey, RequestId
from common.types import SamplingParams, StopConditions
from engine.batch import StepResults
from engine.block_allocator import BlockAllocator
from engine.commands import Abort, Generate, Sampled, SequenceSpec
from engine.prefix_index import PrefixIndex
from engine.scheduler import Scheduler, SchedulerSettings

BLOCK_SIZE = 16
VOCAB = 49152
FAR = 1 << 20
"""More completion tokens than any measurement takes."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Median microseconds of one operation; `per` names what it is counted per."""

    what: str
    per: str
    num_running: int
    num_tokens: int
    num_waiting: int
    us: float


def spec(name: int, token_ids: tuple[int, ...], max_new_tokens: int = FAR) -> SequenceSpec:
    key = AttemptKey(RequestId(f"cost-{name}"), 1)
    return SequenceSpec(key, token_ids, len(token_ids), SamplingParams(seed=name), StopConditions(max_new_tokens))


def own_prompt(name: int, num_tokens: int) -> tuple[int, ...]:
    """Token ids that share no block with another name."""
    return (name % VOCAB, name // VOCAB, *(range(7, 5 + num_tokens)))[:num_tokens]


class Engine:
    """A scheduler with `num_running` sequences that decode at `num_tokens` of context."""

    def __init__(
        self, num_running: int, num_tokens: int, *, num_more: int = 0, num_more_tokens: int = 0, rounds: int = 0
    ) -> None:
        blocks = num_running * (num_tokens // BLOCK_SIZE + 2 + rounds // BLOCK_SIZE)
        blocks += num_more * (num_more_tokens // BLOCK_SIZE + 2)
        self.allocator = BlockAllocator(blocks + 16)
        self.num_names = 0
        self.scheduler = Scheduler(
            SchedulerSettings(
                block_size=BLOCK_SIZE,
                token_budget=1 << 30,  # every prompt in one step
                prefill_tokens_max=1 << 30,
                max_sequences=num_running + num_more + 1,
                max_sequence_tokens=2 * FAR,
                waiting_max=1 << 20,
            ),
            self.allocator,
            PrefixIndex(self.allocator, BLOCK_SIZE, b"bench"),
        )
        # The pool is far smaller than the longest completions: these stop only with the measurement.
        self.max_new_tokens = min(FAR, (blocks + 16) * BLOCK_SIZE - max(num_tokens, num_more_tokens) - 1)
        for _ in range(num_running):
            self.add(num_tokens)
        while self.scheduler.load().num_waiting_tokens:
            self.step()

    def add(self, num_tokens: int, token_ids: tuple[int, ...] | None = None) -> AttemptKey:
        self.num_names += 1
        new = spec(
            self.num_names, own_prompt(self.num_names, num_tokens) if token_ids is None else token_ids, self.max_new_tokens
        )
        refused = self.scheduler.handle(Generate(new), 0.0)
        assert not refused, refused
        return new.key

    def step(self) -> int:
        batch = self.scheduler.schedule(0.0)
        assert batch is not None
        events = self.scheduler.apply(batch, StepResults([5] * len(batch.sample_rows)), 0.0)
        return sum(isinstance(event, Sampled) for event in events)


def timed(work: Callable[[], object]) -> float:
    start = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - start) / 1e3


def decode_step(num_running: int, num_tokens: int, rounds: int) -> list[Cost]:
    """The parts of a step in which every sequence decodes, over `rounds` steps: block borders are among them."""
    engine = Engine(num_running, num_tokens, rounds=rounds)
    scheduler = engine.scheduler
    parts: dict[str, list[float]] = {"schedule": [], "apply": [], "publish": []}
    for _ in range(rounds):
        start = time.thread_time_ns()
        batch = scheduler.schedule(0.0)
        scheduled = time.thread_time_ns()
        assert batch is not None and len(batch.sample_rows) == num_running
        sampled = StepResults([5] * num_running)
        before = time.thread_time_ns()
        scheduler.apply(batch, sampled, 0.0)
        applied = time.thread_time_ns()
        scheduler.load()
        scheduler.census()
        done = time.thread_time_ns()
        for name, spent in (("schedule", scheduled - start), ("apply", applied - before), ("publish", done - applied)):
            parts[name].append(spent / 1e3)
    return [Cost(f"decode {name}", "step", num_running, num_tokens, 0, statistics.median(spent)) for name, spent in parts.items()]


def admission(num_running: int, num_waiting: int, num_tokens: int, num_shared: int) -> list[Cost]:
    """Taking, admitting and ending one sequence beside `num_running` others, with up to `num_waiting` in the line.

    With `num_shared` all prompts start with so many equal tokens: each admission shares their blocks with all who run.
    """
    engine = Engine(0, 0, num_more=num_running + num_waiting + 1, num_more_tokens=num_tokens)
    shared = tuple(range(9, 9 + num_shared))

    def add() -> AttemptKey:
        return engine.add(num_tokens, shared + own_prompt(engine.num_names + 1, num_tokens - num_shared))

    add()
    engine.step()
    for _ in range(num_running - 1):
        add()
    while engine.scheduler.load().num_waiting:
        engine.step()
    takes, ends, keys = [], [], []
    for _ in range(num_waiting):
        start = time.thread_time_ns()
        keys.append(add())
        takes.append((time.thread_time_ns() - start) / 1e3)
    admitting_us = timed(lambda: engine.scheduler._admit(1 << 30))
    load = engine.scheduler.load()
    assert load.num_waiting == 0, f"{load.num_waiting} of {num_waiting} were not admitted"
    for key in keys:
        ends.append(timed(partial(engine.scheduler.handle, Abort(key, "bench"), 0.0)))
    name = f"{num_shared} shared tokens: " if num_shared else ""
    return [
        Cost(f"{name}take", "sequence", num_running, num_tokens, num_waiting, statistics.median(takes)),
        Cost(f"{name}admit", "sequence", num_running, num_tokens, num_waiting, admitting_us / num_waiting),
        Cost(f"{name}abort", "sequence", num_running, num_tokens, num_waiting, statistics.median(ends)),
    ]


def measure(rounds: int) -> list[Cost]:
    costs: list[Cost] = []
    for num_running in (10, 100, 1000):
        costs += decode_step(num_running, 128, rounds)
    costs += decode_step(100, 4096, rounds)
    for num_running in (10, 100, 1000):
        costs += admission(num_running, 200, 256, 0)
    costs += admission(10, 2000, 256, 0)
    for num_running in (10, 100, 1000):
        costs += admission(num_running, 50, 1024 + 16, 1024)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    costs = measure(arguments.rounds)
    if arguments.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=1))
        return
    print("| what | running | tokens | waiting | us per |\n|---|---|---|---|---|")
    for cost in costs:
        print(f"| {cost.what} | {cost.num_running} | {cost.num_tokens} | {cost.num_waiting} | {cost.us:.1f} / {cost.per} |")


if __name__ == "__main__":
    main()
