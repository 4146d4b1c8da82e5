"""A prefill and a decode worker in one process: real roles, engines and fabric over the KV oracle, and a driver in the router's place.

Each engine runs on its own thread, the links are real sockets, the plane is chosen by the test. Free blocks are poisoned before
every step, so whoever reads a freed or a foreign block fails the engine at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from common.clock import SystemClock
from common.ids import AttemptKey
from common.metrics import WorkerMetrics
from common.rpc import convert
from common.rpc import serving_pb2 as pb
from decode_service.worker import DecodeLimits, DecodeWorker
from engine.batch import StepBatch
from engine.block_allocator import BlockAllocator
from engine.commands import SequenceSpec, StepEvents
from engine.engine_loop import EngineLoop
from engine.prefix_index import PrefixIndex
from engine.scheduler import Scheduler, SchedulerSettings
from engine.serving.session import RouterSession, attempt_message
from kvtransfer.endpoint import KVEndpoint, open_endpoint
from kvtransfer.layout import KVLayout
from kvtransfer.receiver import KVReceiver
from kvtransfer.sender import KVSender
from prefill_service.worker import PrefillLimits, PrefillWorker
from tests.fakes.kv_oracle import FakeRunner

BLOCK = 4
VOCAB = 97
SECRET = b"a secret of the test cluster"
LAYOUT = KVLayout(1, 1, 1, BLOCK, "float32", "oracle")
PREFILL, DECODE = "p@1", "d@1"


class PoisoningRunner(FakeRunner):
    """Runs on the engine thread, so the allocator stands still while it looks."""

    allocator: BlockAllocator

    def run(self, batch: StepBatch) -> list[int]:
        self.poison(self.allocator.free_block_ids())
        return super().run(batch)


@dataclass(slots=True)
class Engine:
    loop: EngineLoop
    runner: PoisoningRunner
    faults: list[BaseException]
    listener: list[object] = field(default_factory=list)


def start_engine(num_blocks: int, chunk: int) -> Engine:
    allocator = BlockAllocator(num_blocks)
    runner = PoisoningRunner(num_blocks, BLOCK, VOCAB)
    runner.allocator = allocator
    settings = SchedulerSettings(
        block_size=BLOCK,
        token_budget=64,
        prefill_tokens_max=chunk,
        max_sequences=16,
        max_sequence_tokens=num_blocks * BLOCK,
        waiting_max=64,
    )
    scheduler = Scheduler(settings, allocator, PrefixIndex(allocator, BLOCK, b"oracle"))
    loop = asyncio.get_running_loop()
    faults: list[BaseException] = []
    engine: Engine

    def on_events(step: StepEvents) -> None:
        loop.call_soon_threadsafe(lambda: engine.listener[0].on_step_events(step))  # type: ignore[attr-defined]

    engine = Engine(
        EngineLoop(scheduler, runner, clock=SystemClock(), on_events=on_events, on_fatal=faults.append), runner, faults
    )
    engine.loop.start()
    return engine


class Recorder(RouterSession):
    """A router's session that keeps every event, and wakes whoever waits for an attempt's end."""

    def __init__(self) -> None:
        super().__init__("router-test")
        self.events: dict[AttemptKey, list[pb.Event]] = {}
        self.ended: dict[AttemptKey, asyncio.Event] = {}

    def post(self, event: pb.Event) -> None:
        key = AttemptKey(event.attempt.request_id, event.attempt.epoch)  # type: ignore[arg-type]
        assert not self.end_of(key).is_set(), f"{key}: an event after the end: {event}"
        self.events.setdefault(key, []).append(event)
        if event.WhichOneof("event") in ("finished", "failed"):
            self.end_of(key).set()

    def end_of(self, key: AttemptKey) -> asyncio.Event:
        return self.ended.setdefault(key, asyncio.Event())

    def kinds(self, key: AttemptKey) -> list[str]:
        return [str(event.WhichOneof("event")) for event in self.events.get(key, [])]

    def tokens(self, key: AttemptKey) -> dict[int, int]:
        """Token index → token; an index that came twice is an assertion."""
        found: dict[int, int] = {}
        for event in self.events.get(key, []):
            for offset, token in enumerate(event.tokens.token_ids):
                index = event.tokens.first_index + offset
                assert index not in found, f"{key}: token {index} came twice"
                found[index] = token
        return found

    def failure(self, key: AttemptKey) -> str:
        return next((event.failed.kind for event in self.events.get(key, []) if event.HasField("failed")), "")


@dataclass(slots=True)
class WorkerPair:
    prefill: PrefillWorker
    decode: DecodeWorker
    prefill_engine: Engine
    decode_engine: Engine
    endpoints: tuple[KVEndpoint, KVEndpoint]
    prefill_session: Recorder = field(default_factory=Recorder)
    decode_session: Recorder = field(default_factory=Recorder)
    counts: dict[str, float] = field(default_factory=dict)

    def message(self, spec: SequenceSpec, deadline_s: float = 0.0) -> pb.SequenceSpec:
        return pb.SequenceSpec(
            token_ids=spec.token_ids,
            num_prompt_tokens=spec.num_prompt_tokens,
            sampling=convert.sampling_to_pb(spec.sampling),
            stop=convert.stop_to_pb(spec.stop),
            deadline_s=deadline_s,
        )

    def send_prefill(self, spec: SequenceSpec, deadline_s: float = 0.0) -> None:
        command = pb.Prefill(
            attempt=attempt_message(spec.key), sequence=self.message(spec, deadline_s), handoff_id=f"ho-{spec.key}"
        )
        self.prefill.on_command(self.prefill_session, pb.Command(prefill=command))

    def send_reserve(self, spec: SequenceSpec, deadline_s: float = 0.0) -> None:
        command = pb.Reserve(
            attempt=attempt_message(spec.key),
            sequence=self.message(spec, deadline_s),
            handoff_id=f"ho-{spec.key}",
            prefill_worker_id="p",
            prefill_incarnation="1",
            prefill_kv_address=self.prefill.kv_address,
        )
        self.decode.on_command(self.decode_session, pb.Command(reserve=command))

    def send_generate(self, spec: SequenceSpec) -> None:
        command = pb.Generate(attempt=attempt_message(spec.key), sequence=self.message(spec))
        self.decode.on_command(self.decode_session, pb.Command(generate=command))

    def abort(self, key: AttemptKey, *, prefill: bool, decode: bool) -> None:
        command = pb.Command(abort=pb.Abort(attempt=attempt_message(key), reason="test"))
        if prefill:
            self.prefill.on_command(self.prefill_session, command)
        if decode:
            self.decode.on_command(self.decode_session, command)

    async def ends(self, key: AttemptKey, timeout_s: float = 8.0) -> None:
        """Until both workers have said their last word of it; less than a lease, so nothing ends by expiry unseen."""
        async with asyncio.timeout(timeout_s):
            await self.prefill_session.end_of(key).wait()
            await self.decode_session.end_of(key).wait()

    async def tokens(self, spec: SequenceSpec) -> list[int]:
        """One request served by both, as the client would see it."""
        self.send_prefill(spec)
        self.send_reserve(spec)
        await self.ends(spec.key)
        merged = self.prefill_session.tokens(spec.key) | self.decode_session.tokens(spec.key)
        first = len(spec.token_ids) - spec.num_prompt_tokens
        assert sorted(merged) == list(range(first, first + len(merged)))
        return [merged[index] for index in sorted(merged)]

    async def check_idle(self) -> None:
        """Nothing is held anywhere; the last release may still be on its way to the engine threads."""
        async with asyncio.timeout(5.0):
            while not self._is_idle():  # noqa: ASYNC110 - snapshots of other threads have no event to wait on
                await asyncio.sleep(0.005)
        assert not self.prefill_engine.faults and not self.decode_engine.faults
        assert self.prefill.num_attempts == self.decode.num_attempts == 0

    def _is_idle(self) -> bool:
        censuses = (self.prefill_engine.loop.census(), self.decode_engine.loop.census())
        slabs = [endpoint.slabs.census() for endpoint in self.endpoints]
        handoffs = [self.prefill.sender.census().handoffs, self.decode.receiver.census().handoffs]
        return all(c.held == 0 for c in censuses) and all(s.free == s.total for s in slabs) and not any(handoffs)


@asynccontextmanager
async def worker_pair(
    *, scheme: str = "inproc", prefill_blocks: int = 128, decode_blocks: int = 128, chunk: int = 8, num_slabs: int = 4
) -> AsyncIterator[WorkerPair]:
    clock = SystemClock()
    engines = [start_engine(prefill_blocks, chunk), start_engine(decode_blocks, chunk)]
    counts: dict[str, float] = {}
    faults: list[BaseException] = []

    def count(name: str, amount: float) -> None:
        counts[name] = counts.get(name, 0) + amount

    async def endpoint(name: str) -> KVEndpoint:
        return await open_endpoint(
            name=name, layout=LAYOUT, transport=scheme, host="127.0.0.1", secret=SECRET, num_slabs=num_slabs,
            slab_bytes=3 * LAYOUT.block_bytes, clock=clock,
        )  # fmt: skip

    ends = (await endpoint(PREFILL), await endpoint(DECODE))

    def arguments(name: str, end: KVEndpoint, engine: Engine) -> dict[str, object]:
        return {
            "worker": name, "layout": LAYOUT, "copier": engine.runner, "plane": end.plane, "slabs": end.slabs, "clock": clock,
            "cluster_secret": SECRET, "settings": end.settings, "count": count, "on_fatal": faults.append,
        }  # fmt: skip

    sender = KVSender(**arguments(PREFILL, ends[0], engines[0]))  # type: ignore[arg-type]
    receiver = KVReceiver(**arguments(DECODE, ends[1], engines[1]))  # type: ignore[arg-type]
    prefill = PrefillWorker(
        submit=engines[0].loop.submit,
        sender=sender,
        endpoint=ends[0],
        kv_address=await sender.start("127.0.0.1", 0),
        describe_worker=pb.WorkerDescription,
        clock=clock,
        limits=PrefillLimits(VOCAB, prefill_blocks * BLOCK),
        metrics=WorkerMetrics(role="prefill", worker_id="p", model="oracle"),
    )
    decode = DecodeWorker(
        submit=engines[1].loop.submit,
        receiver=receiver,
        endpoint=ends[1],
        describe_worker=pb.WorkerDescription,
        on_fault=faults.append,
        clock=clock,
        limits=DecodeLimits(VOCAB, BLOCK, decode_blocks * BLOCK, 8.0),
        metrics=WorkerMetrics(role="decode", worker_id="d", model="oracle"),
    )
    engines[0].listener.append(prefill)
    engines[1].listener.append(decode)
    pair = WorkerPair(prefill, decode, engines[0], engines[1], ends, counts=counts)
    try:
        yield pair
        assert faults == []
    finally:
        await decode.close()
        await prefill.close()
        for engine in engines:
            assert await asyncio.to_thread(engine.loop.stop, 5.0)
