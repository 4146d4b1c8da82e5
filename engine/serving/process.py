"""One worker process from start to exit, the same for both roles: load, listen, register, serve, drain, stop.

A role supplies `make_role`, which joins the engine with its end of the fabric; everything around that is here. The order of the
end matters: stop taking work, finish streams and transfers, only then leave the registry and free memory that peers may read.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from traceback import format_exception as traceback_lines
from typing import Protocol

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from prometheus_client import start_http_server

from common import log
from common.clock import Clock, SystemClock
from common.errors import BatonError, Draining, WorkerUnavailable
from common.ids import Incarnation, WorkerId, new_incarnation
from common.lifecycle import EXIT_FAILED, Lifecycle
from common.metrics import WorkerMetrics
from common.rpc import convert
from common.rpc import serving_pb2 as pb
from common.rpc import serving_pb2_grpc as pb_grpc
from common.rpc.channels import SERVER_OPTIONS
from common.rpc.interceptors import ClusterGate
from common.state.open import open_store
from common.types import BlockCensus, Role, WorkerInfo, WorkerState
from common.version import VERSION
from engine.commands import StepEvents
from engine.serving.engine_host import EngineHost, start_engine
from engine.serving.loop_faults import watch_loop
from engine.serving.registration import Registration
from engine.serving.session import CommandHandler, WorkerServicer
from engine.serving.settings import WorkerSettings, parse_cpus

LOG = log.get_logger("worker")
DRAIN_LOOK_S = 0.05
"""How often a draining worker looks whether it is empty."""
STOP_TIMEOUT_S = 5.0


class RoleWorker(CommandHandler, Protocol):
    """What the process needs of a role beside commands."""

    @property
    def num_attempts(self) -> int: ...

    @property
    def num_handoffs(self) -> int: ...

    @property
    def kv_address(self) -> str: ...

    @property
    def kv_fingerprint(self) -> str: ...

    @property
    def unhealthy_reason(self) -> str | None:
        """Why this process should be replaced, or None: memory that a transport may still touch and that never settles."""
        ...

    def on_step_events(self, step: StepEvents) -> None: ...

    def abort_all(self, error: BatonError) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RoleContext:
    """What a role is made from. `name` (worker id @ incarnation) is this life of the worker towards its peers."""

    worker_id: WorkerId
    incarnation: Incarnation
    host: EngineHost
    clock: Clock
    metrics: WorkerMetrics
    describe: Callable[[], pb.WorkerDescription]
    on_fatal: Callable[[BaseException], None]

    @property
    def name(self) -> str:
        return f"{self.worker_id}@{self.incarnation}"


MakeRole = Callable[[RoleContext], Awaitable[RoleWorker]]


def prepare_process(settings: WorkerSettings) -> None:
    """Pins the process and bounds its compute threads; before any thread pool exists."""
    if settings.cpus:
        os.sched_setaffinity(0, parse_cpus(settings.cpus))
    os.environ["BATON_KERNELS"] = settings.kernels
    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))


async def run_worker(
    role: Role,
    settings: WorkerSettings,
    make_role: MakeRole,
    *,
    prefill_tokens_max: int,
    prefill_tokens_beside_max: int | None = None,
) -> int:
    """Runs until a signal or a fault; returns the exit code. The bounds of prompt chunks are those of SchedulerSettings."""
    process = _WorkerProcess(role, settings, make_role, prefill_tokens_max, prefill_tokens_beside_max)
    return await process.run()


class _WorkerProcess:
    def __init__(
        self,
        role: Role,
        settings: WorkerSettings,
        make_role: MakeRole,
        prefill_tokens_max: int,
        prefill_tokens_beside_max: int | None,
    ) -> None:
        self._role = role
        self._settings = settings
        self._make_role = make_role
        self._prefill_tokens_max = prefill_tokens_max
        self._prefill_tokens_beside_max = prefill_tokens_beside_max
        self._clock = SystemClock()
        self._lifecycle = Lifecycle()
        self._incarnation = new_incarnation()
        self._worker_id = WorkerId(settings.worker_id or f"{role.value}-{socket.gethostname()}-{os.getpid()}")
        self._metrics = WorkerMetrics(role=role.value, worker_id=self._worker_id, model=settings.model_name)
        self._worker: RoleWorker | None = None
        self._grpc_address = ""

    async def run(self) -> int:
        self._lifecycle.install_signal_handlers()
        log.configure_logging(service=self._role.value, worker=self._worker_id)
        watch_loop(asyncio.get_running_loop(), lambda error: self._fault("callback_failed", error))
        try:
            host = await self._start_engine()
        except (OSError, ValueError) as error:
            LOG.error("engine_did_not_start", error=str(error))
            return EXIT_FAILED
        try:
            await self._serve(host)
        finally:
            if not await host.stop(STOP_TIMEOUT_S):
                LOG.warn("engine_thread_did_not_end", timeout_s=STOP_TIMEOUT_S)
            self._lifecycle.state = WorkerState.STOPPED
            LOG.event("worker_stopped", exit_code=self._lifecycle.exit_code)
        return self._lifecycle.exit_code

    async def _start_engine(self) -> EngineHost:
        loop = asyncio.get_running_loop()
        start = self._clock.monotonic()

        def on_events(step: StepEvents) -> None:
            loop.call_soon_threadsafe(self._on_step_events, step)

        def on_fatal(error: BaseException) -> None:
            # stderr first: whatever else is broken, the reason must be readable.
            print(f"engine thread ended: {error!r}", file=sys.stderr, flush=True)  # noqa: T201
            self._lifecycle.fail_threadsafe("engine_failed", error=repr(error))

        shown = -1

        def on_progress(done: int, total: int) -> None:
            nonlocal shown
            tenth = 10 * done // max(total, 1)
            if tenth > shown:
                shown = tenth
                LOG.event("model_loading", percent=10 * tenth)

        host = await asyncio.to_thread(
            start_engine,
            self._settings,
            clock=self._clock,
            on_events=on_events,
            on_fatal=on_fatal,
            on_progress=on_progress,
            on_step=self._metrics.step_ran,
            prefill_tokens_max=self._prefill_tokens_max,
            prefill_tokens_beside_max=self._prefill_tokens_beside_max,
        )
        # What was imported and loaded stays for good: 200,000 objects. A full collection looked through all of them with the GIL held,
        # for 0.13 s on a busy machine, and every sequence waited for its next token that long.
        gc.collect()
        gc.freeze()
        LOG.event(
            "engine_ready",
            seconds=round(self._clock.monotonic() - start, 3),
            kernels=host.kernels,
            weights=host.weights,
            dtype=self._settings.dtype,
            blocks=host.kv_cache.num_blocks,
            block_bytes=host.kv_cache.block_bytes,
            threads=torch.get_num_threads(),
            max_sequence_tokens=host.max_sequence_tokens,
        )
        return host

    def _on_step_events(self, step: StepEvents) -> None:
        assert self._worker is not None, "the engine reported a step before anybody could have asked for one"
        try:
            self._worker.on_step_events(step)
        except Exception as error:
            # A bug in a worker's bookkeeping: what it holds is no longer known, so the process is replaced.
            self._fault("worker_failed", error)

    def _on_background_ended(self, task: asyncio.Task[None]) -> None:
        """They are awaited only at the end: without this a registration or a watch that broke would be missed until then."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault("background_failed", error)

    def _fault(self, event: str, error: BaseException) -> None:
        """An exception that nobody expected, with its traceback in the log; the process stops with a non-zero code."""
        traceback = "".join(traceback_lines(error))
        self._lifecycle.fail(event, error=repr(error), traceback=traceback)

    # serving ------------------------------------------------------------------------------------------------------

    async def _serve(self, host: EngineHost) -> None:
        settings = self._settings
        context = RoleContext(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            host=host,
            clock=self._clock,
            metrics=self._metrics,
            describe=lambda: describe_message(*self._describe(host, worker)),
            on_fatal=lambda error: self._fault("fabric_failed", error),
        )
        worker = self._worker = await self._make_role(context)
        servicer = WorkerServicer(worker, lambda error: self._fault("command_failed", error))
        gate = ClusterGate(settings.secret_bytes, self._metrics.unauthenticated)
        server = grpc.aio.server(interceptors=[gate], options=SERVER_OPTIONS)
        pb_grpc.add_WorkerServicer_to_server(servicer, server)
        health_servicer = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        port = server.add_insecure_port(f"{settings.host}:{settings.grpc_port}")
        self._grpc_address = f"{advertised_host(settings)}:{port}"
        await server.start()
        metrics_server = self._start_metrics_server(host)
        store = open_store(settings.redis_url, settings.cluster)
        await store.start()
        registration = Registration(
            store,
            describe=lambda: self._describe(host, worker),
            heartbeat_s=settings.heartbeat_s,
            ttl_s=settings.worker_ttl_s,
            on_superseded=lambda: self._lifecycle.fail("superseded_by_newer_incarnation"),
            on_store_error=self._metrics.store_error,
        )
        self._lifecycle.ready()
        await health_servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        background = [
            asyncio.create_task(registration.run(), name="registration"),
            asyncio.create_task(self._watch(host, worker), name="watch"),
        ]
        for task in background:
            task.add_done_callback(self._on_background_ended)
        LOG.event("worker_ready", grpc=self._grpc_address, kv=worker.kv_address, transport=settings.transport, pid=os.getpid())
        try:
            await self._until_drained(worker, registration, health_servicer)
        finally:
            servicer.close_sessions()
            await server.stop(1.0)
            await worker.close()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await registration.remove()
            await store.close()
            if metrics_server is not None:
                metrics_server()

    async def _until_drained(self, worker: RoleWorker, registration: Registration, health_servicer: HealthServicer) -> None:
        await self._lifecycle.drain_asked()
        worker.drain()
        registration.publish_soon()
        await health_servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        drained = asyncio.Event()
        looking = asyncio.create_task(self._look_until_empty(worker, drained))
        try:
            if not await self._lifecycle.wait_drained(drained, self._settings.drain_grace_s):
                error: BatonError = Draining(f"the worker stopped after {self._settings.drain_grace_s} s of draining")
                if self._lifecycle.exit_code == EXIT_FAILED:
                    error = WorkerUnavailable("the worker failed")
                LOG.warn("aborting_the_rest", attempts=worker.num_attempts)
                worker.abort_all(error)
                await asyncio.wait([looking], timeout=1.0)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    @staticmethod
    async def _look_until_empty(worker: RoleWorker, drained: asyncio.Event) -> None:
        """Empty twice in a row: a command that a router sent before it saw the drain is still refused politely."""
        looks_empty = 0
        while looks_empty < 4:
            looks_empty = looks_empty + 1 if worker.num_attempts == 0 and worker.num_handoffs == 0 else 0
            await asyncio.sleep(DRAIN_LOOK_S)
        drained.set()

    async def _watch(self, host: EngineHost, worker: RoleWorker) -> None:
        """Declares the process dead when a step never ends or memory never settles; a supervisor replaces it."""
        while True:
            await asyncio.sleep(1.0)
            stalled_s = host.stalled_for_s(self._clock.monotonic())
            if stalled_s > self._settings.engine_stall_s:
                self._lifecycle.fail("engine_stalled", seconds=round(stalled_s, 1), limit_s=self._settings.engine_stall_s)
                return
            if (reason := worker.unhealthy_reason) is not None:
                self._lifecycle.fail("fabric_unhealthy", reason=reason)
                return

    # what others see ----------------------------------------------------------------------------------------------

    def _start_metrics_server(self, host: EngineHost) -> Callable[[], None] | None:
        settings = self._settings
        if settings.metrics_port < 0:
            return None
        self._metrics.on_scrape(lambda: self._metrics.update(host.load(), host.census(), host.counts()))
        server, thread = start_http_server(settings.metrics_port, settings.metrics_host, registry=self._metrics.registry)
        LOG.event("metrics_listening", address=f"{settings.metrics_host}:{server.server_port}")

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join(STOP_TIMEOUT_S)

        return stop

    def _describe(self, host: EngineHost, worker: RoleWorker) -> tuple[WorkerInfo, BlockCensus]:
        census = host.census()
        settings = self._settings
        info = WorkerInfo(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            role=self._role,
            state=self._lifecycle.state,
            grpc_address=self._grpc_address,
            kv_address=worker.kv_address,
            kv_scheme=settings.transport,
            model=settings.model_name,
            kv_fingerprint=worker.kv_fingerprint,
            block_size=settings.block_size,
            num_blocks=census.total,
            max_sequence_tokens=host.max_sequence_tokens,
            dtype=settings.dtype,
            pid=os.getpid(),
            version=VERSION,
            load=replace(host.load(), num_handoffs=worker.num_handoffs),
        )
        return info, census


def describe_message(info: WorkerInfo, census: BlockCensus) -> pb.WorkerDescription:
    return pb.WorkerDescription(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        role=info.role.value,
        state=info.state.value,
        kv_address=info.kv_address,
        kv_scheme=info.kv_scheme,
        model=info.model,
        kv_fingerprint=info.kv_fingerprint,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_sequence_tokens=info.max_sequence_tokens,
        dtype=info.dtype,
        version=info.version,
        census=convert.census_to_pb(census),
    )


def advertised_host(settings: WorkerSettings) -> str:
    """The address that goes into the registry: what was said, else the host name where the worker listens on every address."""
    if settings.advertise_host:
        return settings.advertise_host
    return socket.gethostname() if settings.host in ("0.0.0.0", "::") else settings.host
