"""The engine thread as the event loop sees it: commands in, events out as calls on the loop, death as one callback.

Owns the loaded model, the KV cache and the engine loop of one worker process. It must not know roles or the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.clock import Clock
from common.types import BlockCensus, EngineCounts, WorkerLoad
from engine.block_allocator import BlockAllocator
from engine.commands import Command, StepEvents
from engine.engine_loop import EngineLoop
from engine.kv_cache import KVCache
from engine.model_runner import LoadedModel, load_engine_model
from engine.model_spec import ModelSpec
from engine.prefix_index import PrefixIndex
from engine.scheduler import Scheduler, SchedulerSettings
from engine.serving.settings import WorkerSettings
from engine.weights.packed_cache import default_packed_dir
from kernels.dispatch import select_ops

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class EngineHost:
    """A started engine. `submit` is thread-safe and raises Overloaded when the command queue is full."""

    spec: ModelSpec
    kv_cache: KVCache
    model_digest: str
    max_sequence_tokens: int
    kernels: str
    weights: str
    _loop: EngineLoop

    def submit(self, command: Command) -> None:
        self._loop.submit(command)

    def load(self) -> WorkerLoad:
        return self._loop.load()

    def census(self) -> BlockCensus:
        return self._loop.census()

    def stalled_for_s(self, now: float) -> float:
        """Seconds since the engine thread last passed a step border while it had work; 0 when idle."""
        return self._loop.stalled_for_s(now)

    def counts(self) -> EngineCounts:
        return self._loop.counts()

    async def stop(self, timeout_s: float) -> bool:
        return await asyncio.to_thread(self._loop.stop, timeout_s)


def start_engine(
    settings: WorkerSettings,
    *,
    clock: Clock,
    on_events: Callable[[StepEvents], None],
    on_fatal: Callable[[BaseException], None],
    on_progress: Callable[[int, int], None],
    on_step: Callable[[float], None],
    prefill_tokens_max: int,
    prefill_tokens_beside_max: int | None,
) -> EngineHost:
    """Loads the model, allocates the pool and starts the engine thread. Blocks for the load: call it off the event loop.

    `on_events`, `on_fatal` and `on_step` are called on the engine thread. Raises ValueError or OSError naming what is wrong.
    """
    ops = select_ops(torch.device(settings.device), TORCH_DTYPES[settings.dtype])
    loaded: LoadedModel = load_engine_model(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks or None,
        kv_bytes=settings.kv_bytes,
        ops=ops,
        progress=on_progress,
        packed_dir=default_packed_dir(),
    )
    num_blocks = loaded.kv_cache.num_blocks
    prefill_tokens_max = min(prefill_tokens_max, settings.token_budget)
    fits = min(loaded.spec.max_positions, num_blocks * settings.block_size)
    max_sequence_tokens = min(settings.max_sequence_tokens or fits, fits)
    allocator = BlockAllocator(num_blocks)
    # KV of equal tokens differs with weights and dtype: blocks are never shared across either.
    prefix_index = PrefixIndex(allocator, settings.block_size, f"{loaded.fingerprint_of_weights}:{settings.dtype}".encode())
    scheduler = Scheduler(
        SchedulerSettings(
            block_size=settings.block_size,
            token_budget=settings.token_budget,
            prefill_tokens_max=prefill_tokens_max,
            prefill_tokens_beside_max=None
            if prefill_tokens_beside_max is None
            else min(prefill_tokens_beside_max, prefill_tokens_max),
            max_sequences=min(settings.max_sequences, settings.token_budget),
            max_sequence_tokens=max_sequence_tokens,
            waiting_max=settings.waiting_max,
        ),
        allocator,
        prefix_index,
    )
    engine_loop = EngineLoop(scheduler, loaded.runner, clock=clock, on_events=on_events, on_fatal=on_fatal, on_step=on_step)
    engine_loop.start()
    return EngineHost(
        spec=loaded.spec,
        kv_cache=loaded.kv_cache,
        model_digest=loaded.fingerprint_of_weights,
        max_sequence_tokens=max_sequence_tokens,
        kernels=ops.describe(),
        weights=loaded.weights,
        _loop=engine_loop,
    )
