"""A prefill and a decode worker in one process: real roles, engines and fabric over the KV oracle, and a driver in the router's place.

Each engine runs on its own thread, the links are real sockets, the plane is chosen by the test. Free blocks are poisoned before
every step, so whoever reads a freed or a foreign block fails the engine at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from common.clock import SystemClock
from common.ids import AttemptKey
from common.metrics import WorkerMetrics
from common.rpc import convert
from common.rpc import serving_pb2 as pb
from decode_service.worker import DecodeLimits, DecodeWorker
from engine.batch import StepBatch, StepResults
from engine.block_allocator import BlockAllocator
from engine.commands import SequenceSpec, StepEvents
from engine.engine_loop import EngineLoop
from engine.prefix_index import PrefixIndex
from engine.scheduler import Scheduler, SchedulerSettings
from engine.serving.session import RouterSession, attempt_message
from kvtransfer.counters import LEASES_EXPIRED
from kvtransfer.endpoint import KVEndpoint, open_endpoint
from kvtransfer.layout import KVLayout
from kvtransfer.receiver import KVReceiver
from kvtransfer.sender import KVSender
from kvtransfer.settings import FabricSettings
from prefill_service.worker import PrefillLimits, PrefillWorker
from tests.fakes.kv_oracle import FakeRunner

BLOCK = 4
VOCAB = 97
SECRET = b"a secret of the test cluster"
LAYOUT = KVLayout(1, 1, 1, BLOCK, "float32", "oracle")
PREFILL, DECODE = "p@1", "d@1"


class PoisoningRunner(FakeRunner):
    """Runs on the engine thread, so the allocator stands still while it looks. A closed `gate` holds the engine inside a step."""

    allocator: BlockAllocator
    gate: threading.Event
    held: threading.Event

    def run(self, batch: StepBatch) -> StepResults:
        if not self.gate.is_set():
            self.held.set()
            assert self.gate.wait(10.0), "the test never opened the gate"
        self.poison(self.allocator.free_block_ids())
        return super().run(batch)

    async def is_held(self) -> None:
        """Returns once the engine stands inside a step behind the closed gate."""
        assert await asyncio.to_thread(self.held.wait, 5.0), "the engine has no step to be held in"


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
    runner.gate, runner.held = threading.Event(), threading.Event()
    runner.gate.set()
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
    """A router's session that keeps every event, and wakes whoever waits for the first of a kind."""

    def __init__(self) -> None:
        super().__init__("router-test")
        self.events: dict[AttemptKey, list[pb.Event]] = {}
        self._seen: dict[tuple[AttemptKey, str], asyncio.Event] = {}

    def post(self, event: pb.Event) -> None:
        key = AttemptKey(event.attempt.request_id, event.attempt.epoch)  # type: ignore[arg-type]
        assert not self.seen(key, "end").is_set(), f"{key}: an event after the end: {event}"
        self.events.setdefault(key, []).append(event)
        kind = str(event.WhichOneof("event"))
        self.seen(key, kind).set()
        if kind in ("finished", "failed"):
            self.seen(key, "end").set()

    def seen(self, key: AttemptKey, kind: str) -> asyncio.Event:
        """Set with the first event of this kind; `end` is finished or failed."""
        return self._seen.setdefault((key, kind), asyncio.Event())

    async def sees(self, key: AttemptKey, kind: str, timeout_s: float = 4.0) -> pb.Event:
        """The first event of this kind, waited for; of `end`, the last event."""
        async with asyncio.timeout(timeout_s):
            await self.seen(key, kind).wait()
        events = self.events[key]
        return events[-1] if kind == "end" else next(event for event in events if event.WhichOneof("event") == kind)

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
    faults: list[BaseException] = field(default_factory=list)
    """What the workers and the fabric called a bug; must be empty at the end."""

    def message(self, spec: SequenceSpec, deadline_s: float = 0.0) -> pb.SequenceSpec:
        return pb.SequenceSpec(
            token_ids=spec.token_ids,
            num_prompt_tokens=spec.num_prompt_tokens,
            sampling=convert.sampling_to_pb(spec.sampling),
            stop=convert.stop_to_pb(spec.stop),
            deadline_s=deadline_s,
        )

    def send_prefill(
        self, spec: SequenceSpec, deadline_s: float = 0.0, session: Recorder | None = None, handoff_id: str = ""
    ) -> None:
        command = pb.Prefill(
            attempt=attempt_message(spec.key),
            sequence=self.message(spec, deadline_s),
            handoff_id=handoff_id or f"ho-{spec.key}",
        )
        self.prefill.on_command(session or self.prefill_session, pb.Command(prefill=command))

    def send_reserve(
        self,
        spec: SequenceSpec,
        deadline_s: float = 0.0,
        session: Recorder | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> None:
        """`fields` replace those of the Reserve message."""
        whole: dict[str, Any] = {
            "handoff_id": f"ho-{spec.key}",
            "prefill_worker_id": "p",
            "prefill_incarnation": "1",
            "prefill_kv_address": self.prefill.kv_address,
        } | dict(fields or {})
        command = pb.Reserve(attempt=attempt_message(spec.key), sequence=self.message(spec, deadline_s), **whole)
        self.decode.on_command(session or self.decode_session, pb.Command(reserve=command))

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
            await self.prefill_session.seen(key, "end").wait()
            await self.decode_session.seen(key, "end").wait()

    async def tokens(self, spec: SequenceSpec) -> list[int]:
        """One request served by both, as the client would see it."""
        self.send_prefill(spec)
        self.send_reserve(spec)
        await self.ends(spec.key)
        return self.merged(spec)

    def merged(self, spec: SequenceSpec) -> list[int]:
        """The tokens that both workers sent of it, without a gap or an overlap."""
        merged = self.prefill_session.tokens(spec.key) | self.decode_session.tokens(spec.key)
        assert len(merged) == sum(len(session.tokens(spec.key)) for session in (self.prefill_session, self.decode_session))
        first = len(spec.token_ids) - spec.num_prompt_tokens
        assert sorted(merged) == list(range(first, first + len(merged)))
        return [merged[index] for index in sorted(merged)]

    def reason(self, session: Recorder, spec: SequenceSpec) -> str:
        """How an ended attempt ended: the reason of `finished` or the kind of `failed`."""
        end = session.events[spec.key][-1]
        return end.finished.reason if end.HasField("finished") else end.failed.kind

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
    *,
    scheme: str = "inproc",
    prefill_blocks: int = 128,
    decode_blocks: int = 128,
    chunk: int = 8,
    num_slabs: int = 4,
    settings: FabricSettings | None = None,
    leases_expired: int = 0,
) -> AsyncIterator[WorkerPair]:
    """At the end no task, no error of the event loop and no expired lease beyond `leases_expired` may be left unexplained."""
    clock = SystemClock()
    loop = asyncio.get_running_loop()
    tasks_before = asyncio.all_tasks()
    engines = [start_engine(prefill_blocks, chunk), start_engine(decode_blocks, chunk)]
    counts: dict[str, float] = {}
    faults: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: faults.append(context.get("exception") or RuntimeError(context["message"])))

    def count(name: str, amount: float) -> None:
        counts[name] = counts.get(name, 0) + amount

    async def endpoint(name: str) -> KVEndpoint:
        opened = await open_endpoint(
            name=name, layout=LAYOUT, transport=scheme, host="127.0.0.1", secret=SECRET, num_slabs=num_slabs,
            slab_bytes=3 * LAYOUT.block_bytes, clock=clock,
        )  # fmt: skip
        return replace(opened, settings=settings or opened.settings)

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
    pair = WorkerPair(prefill, decode, engines[0], engines[1], ends, counts=counts, faults=faults)
    try:
        yield pair
    finally:
        for engine in engines:
            engine.runner.gate.set()
        closing_s = clock.monotonic()
        await decode.close()
        await prefill.close()
        closed_s = clock.monotonic()
        for engine in engines:
            assert await asyncio.to_thread(engine.loop.stop, 5.0)
    left = {task.get_name() for task in asyncio.all_tasks() - tasks_before}
    assert not left, f"tasks outlive their workers: {left}"
    assert faults == [] and pair.prefill_engine.faults == [] and pair.decode_engine.faults == []
    assert counts.get(LEASES_EXPIRED, 0) == leases_expired
    assert closed_s - closing_s < 1.0, f"closing two workers took {closed_s - closing_s:.2f} s: something waited for its limit"
