"""The connections to the workers: per worker one multiplexed Session stream that carries all requests of this router.

A client owns its channel, its reader (which always drains: an event is handed to its leg or dropped and counted, never waited for) and
its writer. When the stream ends every leg on it fails with WorkerUnavailable and the client reconnects with back-off until it is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import grpc

from common.errors import BatonError, LayoutMismatch, Overloaded, WorkerUnavailable
from common.ids import AttemptKey
from common.log import EventLogger
from common.rpc import serving_pb2 as pb
from common.rpc import serving_pb2_grpc
from common.rpc.channels import open_channel, secret_metadata
from common.types import WorkerInfo
from router import wire
from router.events import Failed, Finished, LegEvent, Tokens
from router.placement import WorkerKey, worker_key

LegSink = Callable[[LegEvent], None]


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Bounds of one worker connection. Seconds, and commands waiting to be written."""

    connect_timeout_s: float = 3.0
    backoff_min_s: float = 0.1
    backoff_max_s: float = 2.0
    commands_max: int = 4096


@dataclass(slots=True)
class _Leg:
    sink: LegSink
    num_queued_tokens: int


class WorkerClient:
    """One worker incarnation. `dispatch`, `abort` and `detach` are synchronous; `run` is the connection's task."""

    def __init__(
        self,
        info: WorkerInfo,
        *,
        router_id: str,
        version: str,
        cluster_secret: bytes,
        settings: ClientSettings,
        random: Random,
        log: EventLogger,
        on_change: Callable[[], None],
        on_dropped: Callable[[str], None],
    ) -> None:
        self.info = info
        self.key: WorkerKey = worker_key(info)
        self.is_connected = False
        self.num_queued_tokens = 0
        self._router_id = router_id
        self._version = version
        self._secret = cluster_secret
        self._settings = settings
        self._random = random
        self._log = log
        self._on_change = on_change
        self._on_dropped = on_dropped
        self._legs: dict[AttemptKey, _Leg] = {}
        self._commands: asyncio.Queue[pb.Command] = asyncio.Queue()

    @property
    def num_requests(self) -> int:
        return len(self._legs)

    def dispatch(self, key: AttemptKey, command: pb.Command, sink: LegSink, num_queued_tokens: int) -> None:
        """Sends the command that opens a leg. From now on `sink` gets its events, Failed included, until the leg ends.

        Raises WorkerUnavailable when the stream is down, Overloaded when its commands back up.
        """
        if not self.is_connected:
            raise WorkerUnavailable(f"the stream to worker {self.info.worker_id} is down")
        if self._commands.qsize() >= self._settings.commands_max:
            raise Overloaded(f"{self._commands.qsize()} commands wait for worker {self.info.worker_id}", retry_after_s=1.0)
        assert key not in self._legs, f"attempt {key} is already on worker {self.info.worker_id}"
        self._legs[key] = _Leg(sink, num_queued_tokens)
        self.num_queued_tokens += num_queued_tokens
        self._commands.put_nowait(command)

    def abort(self, key: AttemptKey, reason: str) -> None:
        """Ends a leg from our side; its later events are dropped. Does nothing for a leg that has ended."""
        if self._forget(key) and self.is_connected:
            self._commands.put_nowait(wire.abort(key, reason))  # not bounded by itself: at most one per dispatched leg

    def detach(self, key: AttemptKey) -> None:
        """Lets a leg end by itself without anybody listening."""
        leg = self._legs.get(key)
        if leg is not None:
            leg.sink = _ignore

    async def run(self) -> None:
        """Connects, serves the stream, reconnects; until cancelled."""
        delay_s = self._settings.backoff_min_s
        while True:
            error: BatonError = WorkerUnavailable(f"the router closed the stream to worker {self.info.worker_id}")
            was_connected = False
            try:
                await self._session()
                error = WorkerUnavailable(f"worker {self.info.worker_id} closed its stream")
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, TimeoutError, OSError) as caught:
                error = WorkerUnavailable(f"the stream to worker {self.info.worker_id} failed: {_describe(caught)}")
            except BatonError as caught:
                error = caught
            finally:
                was_connected = self.is_connected
                self._disconnected(error)
            self._log.warn("worker_stream_down", worker=self.info.worker_id, error=error.message)
            delay_s = self._settings.backoff_min_s if was_connected else min(delay_s * 2, self._settings.backoff_max_s)
            await asyncio.sleep(delay_s * self._random.uniform(0.5, 1.0))

    async def _session(self) -> None:
        """One life of the stream. Returns when the worker closed it; raises what broke it."""
        metadata = secret_metadata(self._secret)
        async with open_channel(self.info.grpc_address) as channel:
            stub = serving_pb2_grpc.WorkerStub(channel)
            description = await stub.Describe(pb.DescribeRequest(), timeout=self._settings.connect_timeout_s, metadata=metadata)
            self._check_identity(description)
            call = stub.Session(metadata=metadata)
            self._commands = asyncio.Queue()
            self._commands.put_nowait(wire.hello(self._router_id, self._version))
            writer = asyncio.create_task(self._write(call), name=f"write {self.info.worker_id}")
            self.is_connected = True
            self._on_change()
            try:
                await self._read(call)
            finally:
                writer.cancel()
                call.cancel()
                await asyncio.wait([writer])
                if not writer.cancelled():
                    writer.exception()  # the reader reports what broke the stream

    def _check_identity(self, description: pb.WorkerDescription) -> None:
        """Whoever answers at the address must be the life of the worker that the registry named, with the layout it named."""
        if (description.worker_id, description.incarnation) != self.key:
            raise WorkerUnavailable(
                f"{self.info.grpc_address} is worker {description.worker_id} incarnation {description.incarnation}, "
                f"the registry says {self.info.worker_id} incarnation {self.info.incarnation}"
            )
        if description.kv_fingerprint != self.info.kv_fingerprint:
            raise LayoutMismatch(f"worker {self.info.worker_id} describes another KV layout than it registered")

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.Command, pb.Events]) -> None:
        commands = self._commands
        while True:
            await call.write(await commands.get())

    async def _read(self, call: grpc.aio.StreamStreamCall[pb.Command, pb.Events]) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, pb.Events):  # grpc.aio.EOF
                code = await call.code()
                if code is not grpc.StatusCode.OK:
                    raise WorkerUnavailable(
                        f"worker {self.info.worker_id} ended the stream with {code.name}: {await call.details()}"
                    )
                return
            for event in message.events:
                self._deliver(event)

    def _deliver(self, event: pb.Event) -> None:
        key = wire.attempt_key(event.attempt)
        leg = self._legs.get(key)
        if leg is None:
            self._on_dropped("ended_attempt")
            return
        value = wire.leg_event(event)
        if value is None:
            self._on_dropped("unknown_kind")
            return
        if isinstance(value, Tokens):
            self.num_queued_tokens -= leg.num_queued_tokens
            leg.num_queued_tokens = 0
        elif isinstance(value, Finished | Failed):
            self._forget(key)
        leg.sink(value)

    def _forget(self, key: AttemptKey) -> bool:
        leg = self._legs.pop(key, None)
        if leg is None:
            return False
        self.num_queued_tokens -= leg.num_queued_tokens
        return True

    def _disconnected(self, error: BatonError) -> None:
        if not isinstance(error, WorkerUnavailable):
            error = WorkerUnavailable(f"worker {self.info.worker_id} cannot be used: {error.message}")
        self.is_connected = False
        legs, self._legs = self._legs, {}
        self.num_queued_tokens = 0
        for leg in legs.values():
            leg.sink(Failed(error))
        self._on_change()


class WorkerPool:
    """The clients of all workers in the fleet's view, and their tasks."""

    def __init__(self, make_client: Callable[[WorkerInfo], WorkerClient]) -> None:
        self._make_client = make_client
        self._clients: dict[WorkerKey, WorkerClient] = {}
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def sync(self, infos: list[WorkerInfo]) -> None:
        """Opens clients for new workers, refreshes what is known of the others, closes those that are gone."""
        wanted = {worker_key(info): info for info in infos}
        for key in [key for key in self._clients if key not in wanted]:
            self._close(key)
        for key, info in wanted.items():
            client = self._clients.get(key)
            if client is not None and client.info.grpc_address == info.grpc_address:
                client.info = info
                continue
            if client is not None:
                self._close(key)
            client = self._clients[key] = self._make_client(info)
            self._tasks[key] = asyncio.create_task(client.run(), name=f"worker {info.worker_id}")

    def get(self, key: WorkerKey) -> WorkerClient | None:
        return self._clients.get(key)

    def clients(self) -> list[WorkerClient]:
        return list(self._clients.values())

    async def close(self) -> None:
        for key in list(self._clients):
            self._close(key)
        if self._closing:
            await asyncio.wait(self._closing)

    def _close(self, key: WorkerKey) -> None:
        del self._clients[key]
        task = self._tasks.pop(key)
        task.cancel()
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _ignore(event: LegEvent) -> None:
    """The sink of a detached leg."""


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
