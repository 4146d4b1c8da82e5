"""A bug on any path into a worker stops its process with a non-zero code and says so; a library's noise does not.

The process is the real one (`run_worker`: gRPC, registration, lifecycle); the engine and the role are stand-ins that fail on demand.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from common import log
from common.errors import BatonError
from common.lifecycle import EXIT_FAILED, EXIT_OK
from common.rpc import serving_pb2 as pb
from common.rpc import serving_pb2_grpc as pb_grpc
from common.rpc.channels import open_channel, secret_metadata
from common.types import BlockCensus, EngineCounts, Role, WorkerLoad
from engine.commands import StepEvents
from engine.serving import process
from engine.serving.process import RoleContext, RoleWorker, run_worker
from engine.serving.session import RouterSession
from engine.serving.settings import WorkerSettings, parse_cpus
from tests.harness import free_port

SECRET = "a secret of the test cluster"
STOP_S = 5.0
HELLO = pb.Command(hello=pb.Hello(router_id="router-test", version="0"))
ABORT = pb.Command(abort=pb.Abort(attempt=pb.Attempt(request_id="r", epoch=1)))


class StandInEngine:
    kernels = "none"
    weights = "none"
    max_sequence_tokens = 64
    kv_cache = SimpleNamespace(num_blocks=8, block_bytes=64)

    def load(self) -> WorkerLoad:
        return WorkerLoad(0, 0, 0, 8, 0)

    def counts(self) -> EngineCounts:
        return EngineCounts()

    def census(self) -> BlockCensus:
        return BlockCensus(total=8, free=8, cached=0, held=0, held_by={})

    def stalled_for_s(self, now: float) -> float:
        return 0.0

    async def stop(self, timeout_s: float) -> bool:
        return True


class FaultyRole:
    """Does `on_abort` when a router sends an abort, and breaks in the other places when told to."""

    num_attempts = 0
    num_handoffs = 0
    kv_address = ""
    unhealthy_reason: str | None = None

    def __init__(self, context: RoleContext, on_abort: Callable[[FaultyRole], None]) -> None:
        self.context = context
        self.commanded = asyncio.Event()
        self.breaks_in_step = False
        self.breaks_in_describe = False
        self._on_abort = on_abort

    @property
    def kv_fingerprint(self) -> str:
        if self.breaks_in_describe:
            self.breaks_in_describe = False
            raise RuntimeError("a bug in describe")
        return "fingerprint"

    def on_command(self, session: RouterSession, command: pb.Command) -> None:
        self.commanded.set()
        self._on_abort(self)

    def on_step_events(self, step: StepEvents) -> None:
        if self.breaks_in_step:
            raise RuntimeError("a bug in on_step_events")

    def on_session_closed(self, session: RouterSession) -> None: ...

    def describe(self) -> pb.WorkerDescription:
        return self.context.describe()

    def drain(self) -> int:
        return 0

    def abort_all(self, error: BatonError) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture
def log_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What the process logs; the test runner's own log handlers come back afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("baton")
    before = list(root.handlers), root.level, ours.level
    stream = io.StringIO()
    configure = log.configure_logging
    monkeypatch.setattr(log, "configure_logging", lambda **fields: configure(stream=stream, **fields))
    yield stream
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def logged(stream: io.StringIO, event: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, stream.getvalue().splitlines()) if line["event"] == event]


@asynccontextmanager
async def router_of(port: int) -> AsyncIterator[Callable[[pb.Command], Any]]:
    """A router's stream to the worker; gives the function that writes a command."""
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = pb_grpc.WorkerStub(channel).Session(metadata=secret_metadata(SECRET.encode()), wait_for_ready=True)
        await call.write(HELLO)
        try:
            yield call.write
        finally:
            call.cancel()


class Run:
    """One life of the process, and the thread-safe call by which its engine reports a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_abort: Callable[[FaultyRole], None]) -> None:
        self.role: FaultyRole
        self.report_step: Callable[[], None]
        self.port = free_port()

        def start_engine(_: WorkerSettings, *, on_events: Callable[[StepEvents], None], **__: object) -> StandInEngine:
            self.report_step = lambda: on_events(StepEvents(0.0, ()))
            return StandInEngine()

        async def make_role(context: RoleContext) -> RoleWorker:
            self.role = FaultyRole(context, on_abort)
            return self.role

        monkeypatch.setattr(process, "start_engine", start_engine)
        settings = WorkerSettings(
            model=Path("no-model"), cluster_secret=SecretStr(SECRET), redis_url="memory://", grpc_port=self.port, metrics_port=-1,
            heartbeat_s=0.02,
        )  # fmt: skip
        self.ended = asyncio.create_task(run_worker(Role.PREFILL, settings, make_role, prefill_tokens_max=16))

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.ended, STOP_S)

    async def after_abort(self) -> int:
        """The exit code after a router's abort has reached the role; what ended a process that never served is raised."""
        commanded = asyncio.create_task(self._command())
        await asyncio.wait((commanded, self.ended), timeout=STOP_S, return_when=asyncio.FIRST_COMPLETED)
        try:
            return await self.exit_code()
        finally:
            commanded.cancel()
            await asyncio.wait((commanded,))

    async def _command(self) -> None:
        async with router_of(self.port) as write:
            await write(ABORT)
            await self.role.commanded.wait()
            await self.ended


def break_in_command(_: FaultyRole) -> None:
    raise RuntimeError("a bug in on_command")


def break_in_timer(_: FaultyRole) -> None:
    asyncio.get_running_loop().call_later(0.0, parse_cpus, "a bug in a timer")


def break_in_step(run: list[Run]) -> Callable[[FaultyRole], None]:
    def arm(role: FaultyRole) -> None:
        role.breaks_in_step = True
        run[0].report_step()

    return arm


def break_in_background(role: FaultyRole) -> None:
    role.breaks_in_describe = True  # the next heartbeat of the registration finds it


@pytest.mark.parametrize(
    ("event", "on_abort"),
    [
        ("command_failed", break_in_command),
        ("callback_failed", break_in_timer),
        ("worker_failed", break_in_step),
        ("background_failed", break_in_background),
    ],
)
async def test_bug_on_any_path_stops_the_process_and_is_logged_with_its_traceback(
    event: str, on_abort: Any, monkeypatch: pytest.MonkeyPatch, log_lines: io.StringIO
) -> None:
    runs: list[Run] = []
    runs.append(Run(monkeypatch, break_in_step(runs) if on_abort is break_in_step else on_abort))
    assert await runs[0].after_abort() == EXIT_FAILED
    (line,) = logged(log_lines, event)
    assert line["level"] == "error" and "a bug in" in line["error"] and "Traceback" in line["traceback"]


async def test_error_inside_a_library_is_logged_and_the_worker_goes_on(
    monkeypatch: pytest.MonkeyPatch, log_lines: io.StringIO
) -> None:
    def noise(_: FaultyRole) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(json.loads, "no json")
        loop.call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)

    assert await Run(monkeypatch, noise).after_abort() == EXIT_OK
    (line,) = logged(log_lines, "event_loop_error")
    assert "JSONDecodeError" in line["error"]
