"""The worker's side of the Session stream: one object per connected router, and the servicer that makes them.

A session owns the outgoing events of one router. Whatever the engine thread reports for one step is posted in one event-loop
callback and so leaves as one message: cost grows with steps, not with tokens. It must not know what commands mean; a
`CommandHandler` does. A router that stops reading is cut off at `PENDING_EVENTS_MAX`, and its requests are aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc

from common import log
from common.errors import BatonError
from common.ids import ID_LENGTH_MAX, AttemptKey, RequestId
from common.rpc import convert
from common.rpc import serving_pb2 as pb
from common.rpc import serving_pb2_grpc as pb_grpc
from engine.commands import PromptLogprobs, Sampled

LOG = log.get_logger("worker.session")

PENDING_EVENTS_MAX = 65_536
"""Events that may wait for one router. At 64 sequences and 100 steps a second this is ten seconds of a router not reading."""


class RouterSession:
    """One router's stream. `post` never blocks; `closed` is true once nothing can be delivered any more."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.closed = False
        self._pending: list[pb.Event] = []
        self._wake = asyncio.Event()

    def post(self, event: pb.Event) -> None:
        if self.closed:
            return
        if len(self._pending) >= PENDING_EVENTS_MAX:
            LOG.warn("session_overflow", router=self.router_id, pending=len(self._pending))
            self.close()
            return
        self._pending.append(event)
        self._wake.set()

    def close(self) -> None:
        self.closed = True
        self._pending.clear()
        self._wake.set()

    async def batches(self) -> AsyncIterator[pb.Events]:
        """What is pending, one message at a time, until the session is closed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.closed:
                return
            batch, self._pending = self._pending, []
            if batch:
                yield pb.Events(events=batch)


class CommandHandler(Protocol):
    """The worker. All calls come on the event loop, return quickly and do not raise for bad input: they answer with Failed."""

    def on_command(self, session: RouterSession, command: pb.Command) -> None: ...

    def on_session_closed(self, session: RouterSession) -> None:
        """The router is gone: abort everything that it asked for."""
        ...

    def describe(self) -> pb.WorkerDescription: ...

    def drain(self) -> int:
        """Stops taking work; returns how many attempts are left."""
        ...


class WorkerServicer(pb_grpc.WorkerServicer):
    """gRPC in front of a CommandHandler; the same for both roles."""

    def __init__(self, handler: CommandHandler, on_fault: Callable[[BaseException], None]) -> None:
        """`on_fault` is told of an exception in the handler: that is a bug, and the worker stops."""
        self._handler = handler
        self._on_fault = on_fault
        self._sessions: set[RouterSession] = set()

    async def Session(
        self, request_iterator: AsyncIterator[pb.Command], context: grpc.aio.ServicerContext[pb.Command, pb.Events]
    ) -> AsyncIterator[pb.Events]:
        hello = await anext(aiter(request_iterator), None)
        if hello is None or hello.WhichOneof("command") != "hello" or not 0 < len(hello.hello.router_id) <= ID_LENGTH_MAX:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first command of a session must be hello with a router_id")
            return
        session = RouterSession(hello.hello.router_id)
        self._sessions.add(session)
        LOG.event("session_opened", router=session.router_id, router_version=hello.hello.version)
        reader = asyncio.create_task(self._read(session, request_iterator), name=f"session-reader:{session.router_id}")
        try:
            async for events in session.batches():
                yield events
        finally:
            session.close()
            self._sessions.discard(session)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._handler.on_session_closed(session)
            LOG.event("session_closed", router=session.router_id)

    async def _read(self, session: RouterSession, commands: AsyncIterator[pb.Command]) -> None:
        try:
            async for command in commands:
                try:
                    self._handler.on_command(session, command)
                except Exception as error:
                    self._on_fault(error)
                    raise
        finally:
            session.close()

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext[pb.DescribeRequest, pb.WorkerDescription]
    ) -> pb.WorkerDescription:
        return self._handler.describe()

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainReply]
    ) -> pb.DrainReply:
        return pb.DrainReply(remaining=self._handler.drain())

    def close_sessions(self) -> None:
        """Ends every stream after what is pending now has been dropped; used when the worker stops."""
        for session in list(self._sessions):
            session.close()


def attempt_key(attempt: pb.Attempt) -> AttemptKey:
    return AttemptKey(RequestId(attempt.request_id), attempt.epoch)


def attempt_message(key: AttemptKey) -> pb.Attempt:
    return pb.Attempt(request_id=key.request_id, epoch=key.epoch)


def tokens_message(event: Sampled) -> pb.Tokens:
    return pb.Tokens(
        first_index=event.first_index,
        token_ids=event.token_ids,
        logprobs=[convert.logprobs_to_pb(logprobs) for logprobs in event.logprobs],
    )


def prompt_logprobs_message(event: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(
        first_position=event.first_position, logprobs=[convert.logprobs_to_pb(logprobs) for logprobs in event.logprobs]
    )


def failed_message(error: BatonError) -> pb.Failed:
    return pb.Failed(kind=error.kind, message=error.message, retry_after_s=error.retry_after_s or 0.0)
