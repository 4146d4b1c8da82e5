"""Runs steps of a real engine (scheduler, runner, kernels) on one thread and times them; no loop, no services, no network.

Sequences that only decode begin as if their KV had been handed over: reserved and committed over a pool of random values, so that a
context of thousands of tokens costs no prefill. Seconds; a step is schedule, run and apply.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from common.ids import AttemptKey, RequestId
from common.types import SamplingParams, StopConditions
from engine.block_allocator import BlockAllocator
from engine.commands import Commit, Generate, Reserve, SequenceSpec
from engine.model_runner import LoadedModel, load_engine_model
from engine.prefix_index import PrefixIndex
from engine.scheduler import Scheduler, SchedulerSettings
from kernels.dispatch import select_ops
from kernels.native import NativeOps

BLOCK_SIZE = 16
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(slots=True)
class NativeClock:
    """Time and number of calls into native code; wraps every function of the library, below all Python of ours."""

    seconds: float = 0.0
    num_calls: int = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - start
            self.num_calls += 1
            return result

        return timed

    def reset(self) -> None:
        self.seconds, self.num_calls = 0.0, 0


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    native_seconds: float
    num_native_calls: int


@dataclass(slots=True)
class Engine:
    """A loaded model and what it runs on. `kernels` says which implementation; a reference has no native share."""

    loaded: LoadedModel
    kernels: str
    native: NativeClock
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    num_names: int = 0

    def scheduler(self, *, prefill_tokens_max: int, beside: int | None = None, max_sequences: int = 256) -> Scheduler:
        """A new scheduler with the whole pool; the cache keeps what it has."""
        allocator = BlockAllocator(self.loaded.kv_cache.num_blocks)
        settings = SchedulerSettings(
            block_size=BLOCK_SIZE,
            token_budget=max(8192, prefill_tokens_max + max_sequences),
            prefill_tokens_max=prefill_tokens_max,
            prefill_tokens_beside_max=beside,
            max_sequences=max_sequences,
            max_sequence_tokens=self.loaded.spec.max_positions,
            waiting_max=max_sequences,
        )
        return Scheduler(settings, allocator, PrefixIndex(allocator, BLOCK_SIZE, b"bench"))

    def spec(self, num_tokens: int, max_new_tokens: int) -> SequenceSpec:
        self.num_names += 1
        token_ids = tuple(self.rng.randrange(self.loaded.spec.vocab_size) for _ in range(num_tokens))
        key = AttemptKey(RequestId(f"bench-{self.num_names}"), 1)
        return SequenceSpec(key, token_ids, num_tokens, SamplingParams(temperature=0.0), StopConditions(max_new_tokens))

    def decoding(self, scheduler: Scheduler, num_sequences: int, context: int, num_steps: int) -> None:
        """Adds sequences whose KV of `context` tokens "has arrived"."""
        for _ in range(num_sequences):
            spec = self.spec(context, num_steps + 2)
            (reserved,) = scheduler.handle(Reserve(spec), 0.0)
            assert type(reserved).__name__ == "Reserved", reserved
            scheduler.handle(Commit(spec.key, 17), 0.0)

    def step(self, scheduler: Scheduler) -> Step | None:
        self.native.reset()
        start = time.perf_counter()
        batch = scheduler.schedule(start)
        if batch is None:
            return None
        scheduler.apply(batch, self.loaded.runner.run(batch), start)
        return Step(time.perf_counter() - start, self.native.seconds, self.native.num_calls)

    def decode(self, num_sequences: int, context: int, num_steps: int) -> list[Step]:
        """`num_steps` steps in which all sequences decode at about `context` tokens; one before them is not counted."""
        scheduler = self.scheduler(prefill_tokens_max=256)
        self.decoding(scheduler, num_sequences, context - 1, num_steps + 1)
        steps = [self.step(scheduler) for _ in range(num_steps + 1)]
        return [step for step in steps[1:] if step is not None]

    def prefill(self, num_tokens: int, chunk: int) -> list[Step]:
        """One prompt to its first token, in chunks, with a cold prefix cache."""
        scheduler = self.scheduler(prefill_tokens_max=chunk)
        refused = scheduler.handle(Generate(self.spec(num_tokens, 1)), 0.0)
        assert not refused, refused
        steps: list[Step] = []
        while (step := self.step(scheduler)) is not None:
            steps.append(step)
        return steps

    def mixed(self, num_sequences: int, context: int, chunk: int, num_steps: int) -> list[Step]:
        """Steps in which all sequences decode and one prompt computes a chunk of `chunk` tokens beside them; 0: none."""
        scheduler = self.scheduler(prefill_tokens_max=max(chunk, 1), beside=max(chunk, 1))
        self.decoding(scheduler, num_sequences, context - 1, num_steps + 1)
        if chunk:
            scheduler.handle(Generate(self.spec(chunk * (num_steps + 2), 1)), 0.0)
        steps = [self.step(scheduler) for _ in range(num_steps + 1)]
        return [step for step in steps[1:] if step is not None]

    def count_calls(self, num_sequences: int, context: int) -> tuple[int, int]:
        """Calls of Python functions, and of C functions from Python, in one decode step; counted, so the same at every run."""
        scheduler = self.scheduler(prefill_tokens_max=256)
        self.decoding(scheduler, num_sequences, context - 1, 4)
        self.step(scheduler)
        counts = {"call": 0, "c_call": 0}

        def count(frame: FrameType, event: str, argument: object) -> None:
            if event in counts:
                counts[event] += 1

        sys.setprofile(count)
        try:
            self.step(scheduler)
        finally:
            sys.setprofile(None)
        return counts["call"], counts["c_call"]


def load_engine(folder: Path, dtype: str, num_pool_tokens: int) -> Engine:
    """Loads the model and fills a pool of so many tokens with random values."""
    ops, native = select_ops(torch.device("cpu"), DTYPES[dtype]), NativeClock()
    if isinstance(ops, NativeOps):
        for name, function in list(ops._c.items()):
            ops._c[name] = native.wrap(function)
    num_blocks = -(-num_pool_tokens // BLOCK_SIZE)
    loaded = load_engine_model(folder, dtype=dtype, device="cpu", block_size=BLOCK_SIZE, num_blocks=num_blocks, ops=ops)
    pattern = torch.randn(1, *loaded.kv_cache.tensor.shape[1:]).to(loaded.kv_cache.tensor.dtype)
    loaded.kv_cache.tensor[:] = pattern  # written, so that each block has pages of its own
    return Engine(loaded, ops.describe(), native)
