"""The state store on a Redis-compatible server (Redis 7 command set). Keys, all under the cluster's name, all with a TTL:

    {cluster}:worker:<id>      hash  incarnation, record (JSON), census (JSON)      TTL = heartbeat's
    {cluster}:orders:<id>      hash  incarnation -> order of first publication      TTL 1 day
    {cluster}:workers          zset  worker id -> expiry (server's wall ms)          TTL 1 day
    {cluster}:epoch:<request>  counter                                              TTL 1 h
    {cluster}:journal:<request> hash epoch, final, entry (JSON)                     TTL given
    {cluster}:journal          zset  request id -> updated (wall s), bounded        TTL = longest entry's

The braces are a hash tag: on a Redis cluster all keys of one fleet live in one slot, as the scripts need. Every command runs in a task
of its own that a caller's cancellation does not reach: a connection whose reply was never read would hand it to the next command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from common import log
from common.errors import StoreUnavailable
from common.ids import RequestId, WorkerId
from common.state import codec
from common.state.store import EPOCH_TTL_S, FINAL_JOURNAL_STATES, JOURNAL_ENTRIES_MAX, JournalEntry
from common.types import BlockCensus, WorkerInfo

LOG = log.get_logger("store")
DAY_MS = 86_400_000
SCRIPTS = Path(__file__).parent / "scripts"
COMMANDS_MAX = 256
"""Commands under way at once; more wait for a place, inside their timeout."""


class RedisStateStore:
    def __init__(self, url: str, cluster: str, *, timeout_s: float = 1.0) -> None:
        """Connects lazily. Raises ValueError for a URL that is no Redis URL."""
        self._prefix = f"{{{cluster}}}"
        self._timeout_s = timeout_s
        self._client = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            max_connections=COMMANDS_MAX,
            retry=Retry(NoBackoff(), 1),
            decode_responses=True,
        )
        self._places = asyncio.Semaphore(32)
        self._under_way: set[asyncio.Task[Any]] = set()
        script = self._client.register_script
        self._publish_script = script((SCRIPTS / "publish_worker.lua").read_text())
        self._remove_script = script((SCRIPTS / "remove_worker.lua").read_text())
        self._epoch_script = script((SCRIPTS / "next_epoch.lua").read_text())
        self._journal_script = script((SCRIPTS / "write_journal.lua").read_text())

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    async def _call(self, work: Awaitable[Any]) -> Any:
        """Runs one command to its end, whatever happens to the caller. Raises StoreUnavailable within about the timeout."""
        if len(self._under_way) >= COMMANDS_MAX:
            _close(work)
            raise StoreUnavailable(f"{len(self._under_way)} commands wait for the store already")
        task: asyncio.Task[Any] = asyncio.create_task(self._bounded(work))
        self._under_way.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def _bounded(self, work: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._places.acquire()
        except TimeoutError as error:
            _close(work)
            raise StoreUnavailable(f"the store did not take the command within {self._timeout_s} s") from error
        try:
            # The client's own socket timeout ends a hung read and drops that connection; this is only the outer bound.
            async with asyncio.timeout(3 * self._timeout_s):
                return await work
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable(f"the store failed: {type(error).__name__}: {error}") from error
        finally:
            self._places.release()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it; if nobody waits any more, it is no news

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        """Waits for commands under way (bounded by their timeouts), then closes the connections."""
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._client.aclose()

    async def ping(self) -> bool:
        try:
            return bool(await self._call(self._client.ping()))
        except StoreUnavailable:
            return False

    async def publish_worker(self, info: WorkerInfo, census: BlockCensus, ttl_s: float) -> bool:
        keys = [self._key("worker", info.worker_id), self._key("orders", info.worker_id), self._key("workers")]
        arguments: list[str | int | float] = [
            info.worker_id,
            info.incarnation,
            codec.encode_worker(info),
            codec.encode_census(census),
            max(1, round(ttl_s * 1000)),
            DAY_MS,
        ]
        return bool(await self._call(self._publish_script(keys=keys, args=arguments)))

    async def remove_worker(self, worker_id: WorkerId, incarnation: str) -> None:
        keys = [self._key("worker", worker_id), self._key("workers")]
        await self._call(self._remove_script(keys=keys, args=[worker_id, incarnation]))

    async def _worker_fields(self, field: str) -> list[tuple[WorkerId, str]]:
        worker_ids = sorted(await self._call(self._client.zrange(self._key("workers"), 0, -1)))
        if not worker_ids:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for worker_id in worker_ids:
            pipeline.hget(self._key("worker", worker_id), field)
        values = await self._call(pipeline.execute())
        return [(WorkerId(worker_id), value) for worker_id, value in zip(worker_ids, values, strict=True) if value is not None]

    async def list_workers(self) -> list[WorkerInfo]:
        workers = []
        for worker_id, text in await self._worker_fields("record"):
            try:
                workers.append(codec.decode_worker(text))
            except codec.UNREADABLE as error:
                LOG.warn("worker_record_unreadable", worker=worker_id, error=str(error))
        return workers

    async def block_ownership(self) -> dict[WorkerId, BlockCensus]:
        ownership = {}
        for worker_id, text in await self._worker_fields("census"):
            try:
                ownership[worker_id] = codec.decode_census(text)
            except codec.UNREADABLE as error:
                LOG.warn("census_record_unreadable", worker=worker_id, error=str(error))
        return ownership

    async def next_epoch(self, request_id: RequestId) -> int:
        return int(await self._call(self._epoch_script(keys=[self._key("epoch", request_id)], args=[EPOCH_TTL_S])))

    async def write_journal(self, entry: JournalEntry, ttl_s: float) -> bool:
        keys = [self._key("journal", entry.request_id), self._key("journal")]
        arguments: list[str | int | float] = [
            entry.request_id,
            entry.epoch,
            int(entry.state in FINAL_JOURNAL_STATES),
            codec.encode_journal(entry),
            max(1, round(ttl_s * 1000)),
            entry.updated_wall_s,
            JOURNAL_ENTRIES_MAX,
        ]
        return bool(await self._call(self._journal_script(keys=keys, args=arguments)))

    async def read_journal(self, request_id: RequestId) -> JournalEntry | None:
        text = await self._call(self._client.hget(self._key("journal", request_id), "entry"))
        return None if text is None else codec.decode_journal(text)

    async def list_journal(self, limit: int = 1000) -> list[JournalEntry]:
        request_ids = await self._call(self._client.zrevrange(self._key("journal"), 0, limit - 1))
        if not request_ids:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for request_id in request_ids:
            pipeline.hget(self._key("journal", request_id), "entry")
        entries = []
        for text in await self._call(pipeline.execute()):
            if text is not None:
                try:
                    entries.append(codec.decode_journal(text))
                except codec.UNREADABLE as error:
                    LOG.warn("journal_record_unreadable", error=str(error))
        return entries


def _close(work: Awaitable[Any]) -> None:
    """A command that was never started: closed, so that Python does not warn of a forgotten coroutine."""
    close = getattr(work, "close", None)
    if close is not None:
        close()
