"""A proxy on a Unix socket whose replies come late and in pieces, for tests of what a store client does meanwhile.

Requests pass at once. Knows bytes only; all its randomness is from the generator it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
from random import Random


class SlowProxy:
    """Between the store and the server: replies come late and in pieces, so that cancellation meets every moment of a command."""

    def __init__(self, server_path: str, path: str, random: Random) -> None:
        self._server_path = server_path
        self.path = path
        self._random = random
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> SlowProxy:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Fails when a client has left a connection open."""
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()
        if self._connections:
            _, still_open = await asyncio.wait(self._connections, timeout=5.0)
            assert not still_open, f"{len(still_open)} connections were never closed"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        up_reader, up_writer = await asyncio.open_unix_connection(self._server_path)
        try:
            await asyncio.gather(self._pump(reader, up_writer, slow=False), self._pump(up_reader, writer, slow=True))
        finally:
            for end in (writer, up_writer):
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                cut = self._random.randrange(len(data) + 1) if slow else len(data)
                for part in (data[:cut], data[cut:]):
                    if slow:
                        await asyncio.sleep(self._random.random() * 0.002)
                    writer.write(part)
                    await writer.drain()
        writer.close()
