"""The state store on a Redis-compatible server (Redis 7 command set). Keys, all under the cluster's name, all with a TTL:

    {cluster}:worker:<id>      hash  incarnation, record (JSON), census (JSON)      TTL = heartbeat's
    {cluster}:orders:<id>      zset  incarnation -> order of first publication      TTL 1 day, bounded
    {cluster}:workers          zset  worker id -> expiry (server's wall ms)          TTL 1 day
    {cluster}:epoch:<request>  counter                                              TTL 1 h
    {cluster}:journal:<request> hash epoch, final, entry (JSON)                     TTL given
    {cluster}:journal          zset  request id -> updated (wall s), bounded        TTL = longest entry's

The braces are a hash tag: on a Redis cluster all keys of one fleet live in one slot, as the scripts need. Every command runs in a task
of its own that a caller's cancellation does not reach: a connection whose reply was never read would hand it to the next command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.maint_notifications import MaintNotificationsConfig

from common import log
from common.errors import StoreUnavailable
from common.ids import RequestId, WorkerId
from common.state import codec
from common.state.store import EPOCH_TTL_S, FINAL_JOURNAL_STATES, INCARNATIONS_MAX, JOURNAL_ENTRIES_MAX, JournalEntry
from common.types import BlockCensus, WorkerInfo

LOG = log.get_logger("store")
T = TypeVar("T")
DAY_MS = 86_400_000
UNREADABLE_MAX = 1000
"""So many unreadable values are remembered as said."""
SCRIPTS = Path(__file__).parent / "scripts"
COMMANDS_MAX = 256
"""Commands that may be under way or wait for a connection; more are refused at once."""
CONNECTIONS_MAX = 32


class RedisStateStore:
    def __init__(self, url: str, cluster: str, *, timeout_s: float = 1.0) -> None:
        """Connects lazily. Raises ValueError for a URL that is no Redis URL or has a parameter that no connection knows."""
        self._prefix = f"{{{cluster}}}"
        self._timeout_s = timeout_s
        self._client = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            max_connections=CONNECTIONS_MAX,
            # One more try on a connection that the server closed (it restarted). A command may run twice by that: each is idempotent
            # but INCR, where a skipped epoch does no harm. A timeout is never tried again: it would double the wait.
            retry=Retry(NoBackoff(), 1, (RedisConnectionError,)),
            decode_responses=True,
            # Bytes that are no UTF-8 come through as surrogates and fail in `_read`, one value at a time: an exception on the way
            # would take the other values of a pipeline with it.
            encoding_errors="surrogateescape",
            # Where these notifications are on (the default over TCP), the pool hands out connections that have unread data.
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
        )
        pool = self._client.connection_pool
        try:
            pool.connection_class(**pool.connection_kwargs)  # connects nothing
        except TypeError as error:
            raise ValueError(f"the store's URL has a parameter that no connection knows: {error}") from error
        self._places = asyncio.Semaphore(pool.max_connections)  # the URL may ask for another number
        self._under_way: set[asyncio.Task[Any]] = set()
        self._unreadable: set[str] = set()
        script = self._client.register_script
        self._publish_script = script((SCRIPTS / "publish_worker.lua").read_text())
        self._remove_script = script((SCRIPTS / "remove_worker.lua").read_text())
        self._epoch_script = script((SCRIPTS / "next_epoch.lua").read_text())
        self._journal_script = script((SCRIPTS / "write_journal.lua").read_text())

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    async def _call(self, command: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        """Runs one command to its end, whatever happens to the caller. Raises StoreUnavailable when the timeout is over."""
        if len(self._under_way) >= COMMANDS_MAX:
            raise StoreUnavailable(f"{len(self._under_way)} commands wait for the store already")
        task: asyncio.Task[Any] = asyncio.create_task(self._bounded(command, args, kwargs))
        self._under_way.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def _bounded(self, command: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s), self._places:
                return await command(*args, **kwargs)
        except TimeoutError as error:
            raise StoreUnavailable(f"the store did not answer within {self._timeout_s} s") from error
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"the store failed: {type(error).__name__}: {error}") from error

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
            return bool(await self._call(self._client.ping))
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
            INCARNATIONS_MAX,
        ]
        return bool(await self._call(self._publish_script, keys=keys, args=arguments))

    async def remove_worker(self, worker_id: WorkerId, incarnation: str) -> None:
        keys = [self._key("worker", worker_id), self._key("workers")]
        await self._call(self._remove_script, keys=keys, args=[worker_id, incarnation])

    async def _worker_fields(self, field: str) -> list[tuple[WorkerId, str]]:
        worker_ids = sorted(await self._call(self._client.zrange, self._key("workers"), 0, -1))
        if not worker_ids:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for worker_id in worker_ids:
            pipeline.hget(self._key("worker", worker_id), field)
        values = await self._call(pipeline.execute)
        return [(WorkerId(worker_id), value) for worker_id, value in zip(worker_ids, values, strict=True) if value is not None]

    async def list_workers(self) -> list[WorkerInfo]:
        records = await self._worker_fields("record")
        workers = [self._read(codec.decode_worker, text, f"worker:{worker_id}") for worker_id, text in records]
        return [info for info in workers if info is not None]

    async def block_ownership(self) -> dict[WorkerId, BlockCensus]:
        records = await self._worker_fields("census")
        ownership = {worker_id: self._read(codec.decode_census, text, f"census:{worker_id}") for worker_id, text in records}
        return {worker_id: census for worker_id, census in ownership.items() if census is not None}

    async def next_epoch(self, request_id: RequestId) -> int:
        return int(await self._call(self._epoch_script, keys=[self._key("epoch", request_id)], args=[EPOCH_TTL_S]))

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
        return bool(await self._call(self._journal_script, keys=keys, args=arguments))

    async def read_journal(self, request_id: RequestId) -> JournalEntry | None:
        text = await self._call(self._client.hget, self._key("journal", request_id), "entry")
        return None if text is None else self._read(codec.decode_journal, text, f"journal:{request_id}")

    async def list_journal(self, limit: int = 1000) -> list[JournalEntry]:
        entries: dict[RequestId, JournalEntry] = {}
        first = 0
        # The index also names expired entries, which must not hide live ones behind them.
        while (num_missing := limit - len(entries)) > 0:
            request_ids = await self._call(self._client.zrevrange, self._key("journal"), first, first + num_missing - 1)
            if not request_ids:
                break
            first += len(request_ids)
            entries |= {entry.request_id: entry for entry in await self._read_journal_entries(request_ids)}
        return sorted(entries.values(), key=lambda entry: -entry.updated_wall_s)

    async def _read_journal_entries(self, request_ids: list[str]) -> list[JournalEntry]:
        pipeline = self._client.pipeline(transaction=False)
        for request_id in request_ids:
            pipeline.hget(self._key("journal", request_id), "entry")
        texts = await self._call(pipeline.execute)
        entries = [
            self._read(codec.decode_journal, text, f"journal:{request_id}")
            for request_id, text in zip(request_ids, texts, strict=True)
            if text is not None
        ]
        return [entry for entry in entries if entry is not None]

    def _read(self, decode: Callable[[bytes], T], text: str, name: str) -> T | None:
        """The value, or None for one that this version cannot read; said once per value, for readers poll."""
        try:
            return decode(text.encode())
        except codec.UNREADABLE as error:
            if name not in self._unreadable:
                if len(self._unreadable) >= UNREADABLE_MAX:
                    self._unreadable.clear()
                self._unreadable.add(name)
                LOG.warn("store_value_unreadable", value=name, error=f"{type(error).__name__}: {error}")
            return None
