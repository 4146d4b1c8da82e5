"""A tiny OpenAI-compatible server for tests of clients: one asyncio listener, scripted answers, no model.

It counts a prompt's words as tokens plus a fixed template overhead (token ids as they are), streams a scripted number of pieces
with scripted gaps, and records every request body and every connection that the client closed early.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

TEMPLATE_TOKENS = 7
TOKENS_PER_WORD = 2


@dataclass
class FakeOpenAI:
    """`failures` maps the number of a request (from 0, after `calibration` ones) to what goes wrong with it."""

    gap_s: float = 0.0
    first_gap_s: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_running: int = 0
    num_running_max: int = 0
    num_cut: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    pieces: list[str] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    ready_body: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> FakeOpenAI:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await self._read_head(reader):
                request_line, length = head
                body = await reader.readexactly(length)
                if request_line.startswith("GET /v1/models"):
                    await self._plain(writer, 200, {"object": "list", "data": [{"id": "fake"}]})
                elif request_line.startswith("GET /readyz"):
                    await self._plain(writer, 200, self.ready_body)
                else:
                    await self._complete(writer, request_line, json.loads(body))
        except (ConnectionError, asyncio.IncompleteReadError):
            self.num_cut += 1
        finally:
            writer.close()

    async def _read_head(self, reader: asyncio.StreamReader) -> tuple[str, int] | None:
        request_line = (await reader.readline()).decode().strip()
        length = 0
        while line := (await reader.readline()).decode().strip():
            name, _, value = line.partition(":")
            if name.lower() == "content-length":
                length = int(value)
        return (request_line, length) if request_line else None

    async def _plain(self, writer: asyncio.StreamWriter, status: int, payload: dict[str, Any]) -> None:
        body = json.dumps(payload).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
        await writer.drain()

    async def _complete(self, writer: asyncio.StreamWriter, request_line: str, body: dict[str, Any]) -> None:
        number = len(self.bodies)
        self.bodies.append(body)
        self.num_running += 1
        self.idle.clear()
        self.num_running_max = max(self.num_running_max, self.num_running)
        try:
            failure = self.failures.get(number)
            if failure == "refuse":
                error = {"message": "too much", "type": "overloaded_error", "param": None, "code": None}
                await self._plain(writer, 429, {"error": error})
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            is_chat = "/chat/" in request_line
            pieces = self.pieces if self.pieces is not None else [f"w{index} " for index in range(body["max_tokens"])]
            for index, piece in enumerate(pieces):
                await asyncio.sleep(self.gap_s if index else self.first_gap_s)
                if failure == "cut" and index == 1:
                    raise ConnectionResetError
                if failure == "error event" and index == 1:
                    self._event(writer, {"error": {"message": "gone", "type": "service_unavailable_error"}})
                    break
                choice = {"index": 0, "finish_reason": None} | ({"delta": {"content": piece}} if is_chat else {"text": piece})
                self._event(writer, {"choices": [choice]})
                await writer.drain()
            else:
                usage = {"prompt_tokens": self._count(body), "completion_tokens": len(pieces)}
                self._event(writer, {"choices": [], "usage": usage, **self.extra})
                self._data(writer, "[DONE]")
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            self.num_running -= 1
            if not self.num_running:
                self.idle.set()

    def _count(self, body: dict[str, Any]) -> int:
        if isinstance(body.get("prompt"), list):
            return len(body["prompt"])
        text = body["prompt"] if "prompt" in body else " ".join(message["content"] for message in body["messages"])
        return TEMPLATE_TOKENS + TOKENS_PER_WORD * len(text.split())

    def _event(self, writer: asyncio.StreamWriter, payload: dict[str, Any]) -> None:
        self._data(writer, json.dumps(payload))

    def _data(self, writer: asyncio.StreamWriter, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
