"""The HTTP side of a served request: server-sent events or one JSON body, and the watch for a client that leaves.

Reads the output of a request's calls and writes it; owns no request state. The status is decided by the first output item, so what
fails before the first token is a proper HTTP error (unless that takes longer than proxies wait); afterwards a failure is one error
event and the end.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.clock import Clock
from common.errors import BatonError, ClientCancelled
from router.answer import Answer
from router.output import Ended, Errored, OutputItem
from router.responses import SSE_KEEP_ALIVE, ChunkWriter, WholeChoice, error_headers, error_object, full_response

OVERFLOW_GRACE_S = 1.0
"""How long a client that fell too far behind gets to take the error event before the connection is dropped."""


class GenerationResponse(Response):
    """An ASGI response that writes itself. Whatever ends it (done, client gone, server stopping) also ends its calls."""

    def __init__(self, answer: Answer, created: int, clock: Clock, keep_alive_s: float) -> None:
        # Not the base's constructor: it would render a body and headers. The base class is what FastAPI knows a response by.
        self.background = None
        self._answer = answer
        self._request = answer.calls[0].request  # all of them differ in their prompts only
        self._created = created
        self._clock = clock
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write = self._write_stream if self._request.stream else self._write_full
        writer = asyncio.create_task(write(send), name="write response")
        gone = asyncio.create_task(_wait_disconnect(receive), name="watch client")
        too_slow = asyncio.create_task(self._answer.overflowed(), name="watch buffer")
        tasks = {writer, gone, too_slow}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if too_slow.done() and not writer.done():
                await asyncio.wait({writer, gone}, timeout=OVERFLOW_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._answer.cancel(ClientCancelled("the client closed the connection"))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if writer.done() and not writer.cancelled():
            writer.result()

    async def _write_full(self, send: Send) -> None:
        choices = [WholeChoice() for _ in self._answer.calls]
        while not self._answer.is_over:
            index, item = await self._answer.get()
            if isinstance(item, Errored):
                await send_error(send, item.error, self._request.request_id)
                return
            choices[index].add(item)
        await send_json(send, 200, full_response(self._request, self._created, choices, self._answer.usage))

    async def _write_stream(self, send: Send) -> None:
        """The status waits for the first item, but not longer than a proxy would: after the first silence it is 200, and what fails
        then is an error event."""
        taken = await self._next()
        if taken is not None and isinstance(taken[1], Errored):
            await send_error(send, taken[1].error, self._request.request_id)
            return
        chunks = ChunkWriter(self._request, self._created)
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
        await send({"type": "http.response.start", "status": 200, "headers": _raw(headers)})
        head = chunks.start()
        while True:
            if taken is None:
                body = SSE_KEEP_ALIVE
            else:
                index, item = taken
                if isinstance(item, Errored):
                    body = head + chunks.error(item.error)
                    break
                body = head + (chunks.end(index, item) if isinstance(item, Ended) else chunks.text(index, item.text, item.rated))
                head = b""
                if self._answer.is_over:
                    body += chunks.done(self._answer.usage)
                    break
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if taken is not None:
                self._note_first_out(taken[0])
            taken = await self._next()
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _note_first_out(self, index: int) -> None:
        timeline = self._answer.calls[index].timeline
        if not timeline.first_out_s:
            timeline.first_out_s = self._clock.monotonic()

    async def _next(self) -> tuple[int, OutputItem] | None:
        """The next item with its choice, or None after a silence."""
        try:
            async with asyncio.timeout(self._keep_alive_s):
                return await self._answer.get()
        except TimeoutError:
            return None


async def send_json(
    send: Send, status: int, value: dict[str, Any], headers: dict[str, str] | None = None, *, ascii_only: bool = False
) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":")).encode()
    raw = _raw({"content-type": "application/json", "content-length": str(len(body)), **(headers or {})})
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, error: BatonError, request_id: str) -> None:
    await send_json(send, error.rule.http_status, error_object(error, request_id), error_headers(error), ascii_only=True)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
