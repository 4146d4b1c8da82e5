"""What a Redis-compatible server, its connection or a foreign writer can do to the store, and what must not come of it.

Each test has a server of its own, so that it may be killed and hold damaged values; the contract itself is in `test_state_store.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import redis.asyncio

from common.errors import StoreUnavailable
from common.ids import RequestId, WorkerId
from common.redis_server import EmbeddedRedis
from common.state.open import open_store
from common.state.redis import RedisStateStore
from tests.conformance.test_state_store import CENSUS, entry, worker
from tests.fakes.slow_proxy import SlowProxy


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis()
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def store(server: EmbeddedRedis) -> AsyncIterator[RedisStateStore]:
    store = RedisStateStore(server.url, "own", timeout_s=5.0)
    yield store
    await store.close()


@pytest.fixture
async def raw(server: EmbeddedRedis) -> AsyncIterator[redis.asyncio.Redis]:
    """A foreign writer."""
    client = redis.asyncio.Redis.from_url(server.url)
    yield client
    await client.aclose()


async def test_no_reply_goes_to_another_key_when_the_stores_own_deadline_strikes_anywhere(
    server: EmbeddedRedis, store: RedisStateStore, tmp_path: Path
) -> None:
    """Fault A29 from within: a deadline that ends a command at any moment, connecting and pipelines included."""
    random = Random(2629)
    names = [f"r{number}" for number in range(30)]
    for number, name in enumerate(names):
        assert await store.write_journal(entry(name, updated=float(number)), 300.0)
        assert await store.publish_worker(worker(f"w{number:02}"), replace(CENSUS, total=number), 300.0)
    num_right = num_unavailable = 0
    async with SlowProxy(server.url.removeprefix("unix://"), f"{tmp_path}/slow.sock", random) as proxy:
        hasty = RedisStateStore(f"unix://{proxy.path}", "own", timeout_s=5.0)

        async def look() -> None:
            name = random.choice(names)
            found = await hasty.read_journal(RequestId(name))
            assert found is not None and found.request_id == name

        async def list_all() -> None:
            assert [info.worker_id for info in await hasty.list_workers()] == [f"w{number:02}" for number in range(30)]

        async def own() -> None:
            ownership = await hasty.block_ownership()
            assert [census.total for census in ownership.values()] == list(range(30))

        for round_number in range(60):
            hasty._timeout_s = (0.002, 0.005, 0.02, 0.1)[round_number % 4]
            calls = [random.choice((look, look, look, list_all, own))() for _ in range(40)]
            for result in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(result, StoreUnavailable):
                    num_unavailable += 1
                else:
                    assert result is None, result
                    num_right += 1
        assert num_right > 200 and num_unavailable > 200, (num_right, num_unavailable)
        hasty._timeout_s = 5.0
        await asyncio.gather(*[look() for _ in range(64)])  # no connection of the pool was lost on the way
        await hasty.close()


@pytest.mark.parametrize("scheme", ["unix", "redis"])
async def test_a_connection_that_holds_an_unasked_reply_is_not_used_again(
    server: EmbeddedRedis, store: RedisStateStore, tmp_path: Path, scheme: str
) -> None:
    """The last guard of A29: one reply too many must be noticed, not handed to the next command."""
    for name in ("a", "b"):
        await store.write_journal(entry(name), 300.0)
    sent_twice = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(server.url.removeprefix("unix://"))
        while data := await reader.read(65536):
            up_writer.write(data)
            reply = await up_reader.read(65536)
            is_first_look = b"HGET" in data and not sent_twice.is_set()
            writer.write(reply * 2 if is_first_look else reply)
            if is_first_look:
                sent_twice.set()
        for end in (writer, up_writer):
            end.close()

    if scheme == "unix":
        listener = await asyncio.start_unix_server(serve, f"{tmp_path}/proxy.sock")
        url = f"unix://{tmp_path}/proxy.sock"
    else:
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        victim = RedisStateStore(url, "own", timeout_s=5.0)
        assert await victim.read_journal(RequestId("a")) == entry("a")
        assert sent_twice.is_set()
        assert await victim.read_journal(RequestId("b")) == entry("b")
        await victim.close()


async def test_a_server_that_was_killed_and_came_back_empty_serves_the_same_store_again(tmp_path: Path) -> None:
    """Fault A30: nobody restarts because the store did; the next heartbeat and the next epoch find a place."""
    link = tmp_path / "store.sock"
    first, second = EmbeddedRedis(), EmbeddedRedis()
    first.start()
    store = RedisStateStore(f"unix://{link}", "own", timeout_s=5.0)
    try:
        link.symlink_to(first.url.removeprefix("unix://"))
        assert await store.publish_worker(worker("a"), CENSUS, 30.0)
        assert await store.next_epoch(RequestId("r")) == 1
        await asyncio.gather(*[store.next_epoch(RequestId("many")) for _ in range(10)])  # several open connections
        os.kill(first.pid, signal.SIGKILL)
        first.stop()
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await store.publish_worker(worker("a"), CENSUS, 30.0)
        assert await store.ping() is False
        second.start()
        link.unlink()
        link.symlink_to(second.url.removeprefix("unix://"))
        assert await store.ping() is True
        assert await store.list_workers() == []
        assert await store.publish_worker(worker("a"), CENSUS, 30.0)
        assert await store.list_workers() == [worker("a")]
        assert await store.write_journal(entry("r"), 30.0)
        assert await store.next_epoch(RequestId("r")) == 1
        assert await asyncio.gather(*[store.read_journal(RequestId("r")) for _ in range(64)]) == [entry("r")] * 64
    finally:
        await store.close()
        first.stop()
        second.stop()


@pytest.mark.parametrize(
    ("record", "census"),
    [
        (b"\xff\xfe", b"\xff"),
        (b'{"worker_id":"\xff"}', b'{"total":1,"free":1,"cached":0,"held":0,"held_by":{"\xff":1}}'),
        (b"[" * 100_000, b"[" * 100_000),
        (b"null", b'{"total":"1","free":1,"cached":0,"held":0}'),
    ],
    ids=["no_text", "broken_text", "deep", "wrong_types"],
)
async def test_a_damaged_value_hides_no_other(
    store: RedisStateStore, raw: redis.asyncio.Redis, record: bytes, census: bytes
) -> None:
    for name in ("a", "b", "c"):
        await store.publish_worker(worker(name), CENSUS, 30.0)
        await store.write_journal(entry(name), 30.0)
    await raw.hset("{own}:worker:b", mapping={"record": record, "census": census})
    await raw.hset("{own}:journal:b", "entry", record)
    assert [info.worker_id for info in await store.list_workers()] == ["a", "c"]
    assert list(await store.block_ownership()) == ["a", "c"]
    assert await store.read_journal(RequestId("b")) is None
    assert {found.request_id for found in await store.list_journal()} == {"a", "c"}


async def test_a_damaged_worker_is_replaced_by_its_next_heartbeat(store: RedisStateStore, raw: redis.asyncio.Redis) -> None:
    await store.publish_worker(worker("a"), CENSUS, 30.0)
    await raw.hset("{own}:worker:a", mapping={"incarnation": b"\xff", "record": b"\xff"})
    assert await store.publish_worker(worker("a"), CENSUS, 30.0)
    assert await store.list_workers() == [worker("a")]


async def test_expired_entries_do_not_hide_live_ones_from_a_limited_listing(
    store: RedisStateStore, raw: redis.asyncio.Redis
) -> None:
    for number in range(12):
        await store.write_journal(entry(f"r{number:02}", updated=float(number)), 300.0)
    await raw.delete(*[f"{{own}}:journal:r{number:02}" for number in (2, 5, 6, 7, 8, 9, 10, 11)])  # as their TTL does
    assert [found.request_id for found in await store.list_journal(3)] == ["r04", "r03", "r01"]
    assert [found.request_id for found in await store.list_journal(100)] == ["r04", "r03", "r01", "r00"]


async def test_a_removed_worker_may_be_published_again_and_nobody_else_is_touched(store: RedisStateStore) -> None:
    for name in ("a", "b"):
        await store.publish_worker(worker(name), CENSUS, 30.0)
    await store.remove_worker(WorkerId("a"), "first")
    assert await store.list_workers() == [worker("b")]
    assert await store.publish_worker(worker("a"), CENSUS, 30.0)
    assert await store.list_workers() == [worker("a"), worker("b")]


async def test_what_is_gone_leaves_nothing_in_the_indexes(
    store: RedisStateStore, raw: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.state.redis.INCARNATIONS_MAX", 4)
    for number in range(10):
        await store.publish_worker(worker("a", f"life-{number}"), CENSUS, 30.0)
    assert await raw.zcard("{own}:orders:a") == 4
    for number in range(5):
        await store.publish_worker(worker(f"short-{number}"), CENSUS, 0.001)
    await store.publish_worker(worker("gone"), CENSUS, 30.0)
    await store.remove_worker(WorkerId("gone"), "first")
    await raw.zadd("{own}:workers", {f"short-{number}": 1 for number in range(5)})  # long expired, whatever the clocks say
    await store.publish_worker(worker("b"), CENSUS, 30.0)
    assert await raw.zrange("{own}:workers", 0, -1) == [b"a", b"b"]


async def test_closing_waits_for_the_commands_under_way(server: EmbeddedRedis, store: RedisStateStore, tmp_path: Path) -> None:
    """The last word of a service, its final journal entries and the removal of its record, must not be cut off."""
    async with SlowProxy(server.url.removeprefix("unix://"), f"{tmp_path}/slow.sock", Random(5)) as proxy:
        leaving = RedisStateStore(f"unix://{proxy.path}", "own", timeout_s=5.0)
        tasks = [asyncio.create_task(leaving.write_journal(entry(f"r{number}", "finished"), 30.0)) for number in range(20)]
        await asyncio.sleep(0)  # lets them start
        await leaving.close()
        assert await asyncio.gather(*tasks) == [True] * 20
    assert len(await store.list_journal()) == 20


async def test_a_store_at_its_memory_bound_is_unavailable_and_says_why(store: RedisStateStore, raw: redis.asyncio.Redis) -> None:
    assert await store.publish_worker(worker("a"), CENSUS, 30.0)
    await raw.config_set("maxmemory", "1")
    for write in (
        store.write_journal(entry("r"), 30.0),
        store.next_epoch(RequestId("r")),
        store.publish_worker(worker("b"), CENSUS, 30.0),
    ):
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            await write
    assert await store.list_workers() == [worker("a")], "reads go on"
    await raw.config_set("maxmemory", "0")
    assert await store.write_journal(entry("r"), 30.0)


async def test_the_number_of_connections_that_the_url_asks_for_is_enough(server: EmbeddedRedis, raw: redis.asyncio.Redis) -> None:
    narrow = RedisStateStore(f"{server.url}?max_connections=2", "own", timeout_s=5.0)
    assert sorted(await asyncio.gather(*[narrow.next_epoch(RequestId("r")) for _ in range(50)])) == list(range(1, 51))
    assert len(await raw.client_list()) <= 2 + 1
    await narrow.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2/x@host:6379",
        "redis://:hunter2@[host",
        "redis://host?hunter2=1",
        "redis://host:6379?max_connections=hunter2",
        "http://user:abc@hunter2@host",
        "hunter2@host",
        "user:hunter2@host",
    ],
)
def test_a_url_that_cannot_be_read_is_one_line_without_any_piece_of_it(url: str) -> None:
    with pytest.raises(ValueError, match="redis_url") as caught:
        open_store(url, "c")
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
