"""A real router behind a real uvicorn server on a free port, with fake workers, for integration tests.

The registry is a MemoryStateStore that the harness publishes the workers into. Teardown checks that nothing is left: no request, no
permit, no queued token.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from common.api_keys import KeyRing
from common.clock import SystemClock
from common.log import configure_logging, get_logger
from common.state.memory import MemoryStateStore
from common.types import Role
from router.composition import Router
from router.metrics import RouterMetrics
from router.settings import RouterSettings
from tests.fakes.worker import SECRET, FakeWorker, NextToken, hash_token
from tests.unit.router.tiny_tokenizer import make_tokenizer

TTL_S = 60.0


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


class Harness:
    """The router, its workers and a client. `logs` are the parsed log lines of the test."""

    def __init__(
        self, router: Router, store: MemoryStateStore, url: str, log_text: io.StringIO, workers: list[FakeWorker]
    ) -> None:
        self.router = router
        self.store = store
        self.url = url
        self.workers = workers
        self._log_text = log_text
        self.client = httpx.AsyncClient(base_url=url, timeout=30.0)

    @property
    def prefill(self) -> list[FakeWorker]:
        return [w for w in self.workers if w.role is Role.PREFILL]

    @property
    def decode(self) -> list[FakeWorker]:
        return [w for w in self.workers if w.role is Role.DECODE]

    async def publish(self, worker: FakeWorker) -> None:
        await self.store.publish_worker(worker.info(), worker.census, TTL_S)

    async def withdraw(self, worker: FakeWorker) -> None:
        await self.store.remove_worker(worker.info().worker_id, worker.incarnation)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Waits for a condition of the fleet (it changes with views and connections)."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self.router.fleet.changed()

    def num_usable(self, role: Role) -> int:
        return len(self.router.fleet.candidates(role))

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._log_text.getvalue().splitlines()]
        return [line for line in lines if line["event"] == event]

    @property
    def log_text(self) -> str:
        return self._log_text.getvalue()

    def metric(self, name: str, **labels: str) -> float:
        return self.router._metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def running_router(
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    next_token: NextToken = hash_token,
    wait_ready: bool = True,
    settings: dict[str, Any] | None = None,
    workers: list[FakeWorker] | None = None,
    keys: KeyRing | None = None,
) -> AsyncIterator[Harness]:
    handoffs: dict[str, asyncio.Event] = {}
    if workers is None:
        workers = [FakeWorker(f"p{i}", Role.PREFILL, next_token=next_token, handoffs=handoffs) for i in range(num_prefill)]
        workers += [FakeWorker(f"d{i}", Role.DECODE, next_token=next_token, handoffs=handoffs) for i in range(num_decode)]
    log_text = io.StringIO()
    old_handlers = logging.getLogger().handlers[:]
    configure_logging(stream=log_text)
    store = MemoryStateStore(SystemClock())
    await store.start()
    chosen = RouterSettings(
        model=Path("tiny"), cluster_secret=SECRET.decode(), redis_url="memory://", fleet_refresh_s=0.02, local_prompt_tokens_max=4,
        worker_wait_s=0.2, **(settings or {}),
    )  # fmt: skip
    router = Router(
        chosen,
        tokenizer=make_tokenizer(),
        store=store,
        clock=SystemClock(),
        metrics=RouterMetrics(),
        log=get_logger("router"),
        version="test",
        keys=keys,
    )
    server = Server(uvicorn.Config(router.app.asgi, log_config=None, access_log=False, lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    for worker in workers:
        await worker.start()
        await store.publish_worker(worker.info(), worker.census, TTL_S)
    await router.start()
    http = asyncio.create_task(server.serve(sockets=[listener]))
    port = listener.getsockname()[1]
    harness = Harness(router, store, f"http://127.0.0.1:{port}", log_text, workers)
    try:
        if wait_ready:
            counts = [(role, sum(1 for w in workers if w.role is role)) for role in Role]
            await harness.until(lambda: all(harness.num_usable(role) == count for role, count in counts))
        yield harness
        async with asyncio.timeout(5):
            await router.orchestrator.idle.wait()
        assert router.admission.num_active == 0
        assert all(client.num_queued_tokens == 0 for client in router.pool.clients())
    finally:
        await harness.client.aclose()
        server.should_exit = True
        await http
        await router.close()
        await store.close()
        for worker in workers:
            await worker.stop()
        logging.getLogger().handlers[:] = old_handlers


async def sse_events(response: httpx.Response) -> AsyncIterator[Any]:
    """Parsed data of each SSE event; the end marker comes as the string."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
