"""One suite, two stores: what `common/state/store.py` promises, in one process and on a Redis-compatible server.

Each test has a cluster name of its own, and on Redis the teardown fails if any of its keys has no TTL. What only a server can
do to us (hang, restart, mix up replies) is at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest
import redis.asyncio

from common.clock import FakeClock
from common.errors import StoreUnavailable
from common.ids import Incarnation, RequestId, WorkerId
from common.redis_server import EmbeddedRedis
from common.state import store as contract
from common.state.memory import MemoryStateStore
from common.state.open import open_store
from common.state.redis import COMMANDS_MAX, RedisStateStore
from common.state.store import JOURNAL_STATES, JournalEntry, StateStore
from common.types import BlockCensus, Role, WorkerInfo, WorkerLoad, WorkerState
from tests.fakes.slow_proxy import SlowProxy

CENSUS = BlockCensus(total=8, free=5, cached=1, held=2, held_by={"seq:a#1": 2})


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    if url := os.environ.get("REDIS_URL"):
        yield url
        return
    server = EmbeddedRedis()
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def own_server() -> Iterator[EmbeddedRedis]:
    """A server that the test may stop; whatever REDIS_URL says."""
    server = EmbeddedRedis()
    server.start()
    yield server
    with contextlib.suppress(AssertionError, ProcessLookupError):
        os.kill(server.pid, signal.SIGCONT)
    server.stop()


@dataclass(slots=True)
class Subject:
    """A store under test, and how its time passes."""

    store: StateStore
    clock: FakeClock | None

    async def pass_time(self, seconds: float) -> None:
        if self.clock is not None:
            self.clock.advance(seconds)
        else:
            await asyncio.sleep(seconds)  # the server's own clock: expiry is what is tested


async def keys_of(url: str, cluster: str) -> dict[str, int]:
    """Every key of a cluster with its PTTL (-1: none)."""
    client = redis.asyncio.Redis.from_url(url, decode_responses=True)
    try:
        return {key: await client.pttl(key) async for key in client.scan_iter(f"*{{{cluster}}}*")}
    finally:
        await client.aclose()


async def delete_keys(url: str, cluster: str) -> None:
    client = redis.asyncio.Redis.from_url(url, decode_responses=True)
    try:
        for key in await keys_of(url, cluster):
            await client.delete(key)
    finally:
        await client.aclose()


@pytest.fixture(params=["memory", "redis"])
async def subject(request: pytest.FixtureRequest, server_url: str) -> AsyncIterator[Subject]:
    if request.param == "memory":
        clock = FakeClock(100.0)
        yield Subject(MemoryStateStore(clock), clock)
        return
    cluster = f"test-{secrets.token_hex(6)}"
    store = RedisStateStore(server_url, cluster, timeout_s=5.0)
    await store.start()
    yield Subject(store, None)
    await store.close()
    without_ttl = [key for key, ttl_ms in (await keys_of(server_url, cluster)).items() if ttl_ms == -1]
    await delete_keys(server_url, cluster)
    assert without_ttl == [], "keys that would stay for ever"


def worker(worker_id: str, incarnation: str = "first", **changes: object) -> WorkerInfo:
    info = WorkerInfo(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation),
        role=Role.DECODE,
        state=WorkerState.READY,
        grpc_address="127.0.0.1:4001",
        kv_address="127.0.0.1:4002",
        kv_scheme="tcp",
        model="tiny",
        kv_fingerprint="f00d",
        block_size=16,
        num_blocks=8,
        max_sequence_tokens=128,
        dtype="float32",
        pid=4711,
        version="0.1.0",
        load=WorkerLoad(num_running=3, num_waiting=1, num_waiting_tokens=17, num_blocks_available=6, num_handoffs=2),
    )
    return replace(info, **changes)  # type: ignore[arg-type]


def entry(request_id: str, state: str = "streaming", epoch: int = 1, updated: float = 1.0) -> JournalEntry:
    return JournalEntry(RequestId(request_id), state, epoch, "router-1", "tiny", updated_wall_s=updated, created_wall_s=0.5)


# registry -------------------------------------------------------------------------------------------------------------


async def test_a_published_worker_comes_back_field_for_field(subject: Subject) -> None:
    info = worker("decode-0")
    assert await subject.store.publish_worker(info, CENSUS, 30.0)
    assert await subject.store.list_workers() == [info]
    assert await subject.store.block_ownership() == {"decode-0": CENSUS}


async def test_workers_are_listed_by_id_and_an_empty_fleet_is_empty(subject: Subject) -> None:
    assert await subject.store.list_workers() == []
    assert await subject.store.block_ownership() == {}
    for name in ("b", "c", "a"):
        await subject.store.publish_worker(worker(name), CENSUS, 30.0)
    assert [info.worker_id for info in await subject.store.list_workers()] == ["a", "b", "c"]


async def test_a_heartbeat_replaces_record_and_ownership_together(subject: Subject) -> None:
    await subject.store.publish_worker(worker("a"), CENSUS, 30.0)
    draining, empty = worker("a", state=WorkerState.DRAINING), BlockCensus(8, 8, 0, 0)
    assert await subject.store.publish_worker(draining, empty, 30.0)
    assert await subject.store.list_workers() == [draining]
    assert await subject.store.block_ownership() == {"a": empty}


async def test_a_silent_worker_disappears_with_its_blocks(subject: Subject) -> None:
    await subject.store.publish_worker(worker("quiet"), CENSUS, 0.2)
    await subject.store.publish_worker(worker("alive"), CENSUS, 30.0)
    await subject.pass_time(0.4)
    assert [info.worker_id for info in await subject.store.list_workers()] == ["alive"]
    assert list(await subject.store.block_ownership()) == ["alive"]


async def test_a_heartbeat_keeps_a_worker_past_its_first_ttl(subject: Subject) -> None:
    await subject.store.publish_worker(worker("a"), CENSUS, 0.5)
    await subject.store.publish_worker(worker("a"), CENSUS, 30.0)
    await subject.pass_time(0.7)
    assert len(await subject.store.list_workers()) == 1


async def test_an_older_incarnation_cannot_overwrite_its_successor(subject: Subject) -> None:
    old, new = worker("a", "old"), worker("a", "new")
    assert await subject.store.publish_worker(old, CENSUS, 30.0)
    assert await subject.store.publish_worker(new, CENSUS, 30.0), "a restart takes the name over at once"
    assert not await subject.store.publish_worker(old, BlockCensus(8, 8, 0, 0), 30.0)
    assert await subject.store.list_workers() == [new]
    assert await subject.store.block_ownership() == {"a": CENSUS}
    assert await subject.store.publish_worker(new, CENSUS, 30.0)


async def test_an_older_incarnation_may_publish_once_its_successor_has_fallen_silent(subject: Subject) -> None:
    await subject.store.publish_worker(worker("a", "old"), CENSUS, 30.0)
    await subject.store.publish_worker(worker("a", "new"), CENSUS, 0.2)
    assert not await subject.store.publish_worker(worker("a", "old"), CENSUS, 30.0)
    await subject.pass_time(0.4)
    assert await subject.store.publish_worker(worker("a", "old"), CENSUS, 30.0)
    assert [info.incarnation for info in await subject.store.list_workers()] == ["old"]


async def test_incarnations_remembered_are_bounded_and_the_newest_still_wins(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.state.memory.INCARNATIONS_MAX", 4)
    monkeypatch.setattr("common.state.redis.INCARNATIONS_MAX", 4)
    for number in range(12):
        assert await subject.store.publish_worker(worker("a", f"life-{number}"), CENSUS, 30.0)
    assert not await subject.store.publish_worker(worker("a", "life-10"), CENSUS, 30.0)
    assert [info.incarnation for info in await subject.store.list_workers()] == ["life-11"]
    assert await subject.store.publish_worker(worker("a", "life-0"), CENSUS, 30.0), (
        "a life that was forgotten counts as a new one"
    )


async def test_only_its_own_incarnation_removes_a_worker(subject: Subject) -> None:
    await subject.store.publish_worker(worker("a", "new"), CENSUS, 30.0)
    await subject.store.remove_worker(WorkerId("a"), "old")
    await subject.store.remove_worker(WorkerId("nobody"), "old")
    assert len(await subject.store.list_workers()) == 1
    await subject.store.remove_worker(WorkerId("a"), "new")
    assert await subject.store.list_workers() == []
    assert await subject.store.block_ownership() == {}


# epochs and journal ---------------------------------------------------------------------------------------------------


async def test_epochs_count_from_one_for_each_request_alone(subject: Subject) -> None:
    assert [await subject.store.next_epoch(RequestId("r1")) for _ in range(3)] == [1, 2, 3]
    assert await subject.store.next_epoch(RequestId("r2")) == 1


async def test_epochs_taken_at_once_are_all_different(subject: Subject) -> None:
    epochs = await asyncio.gather(*[subject.store.next_epoch(RequestId("r")) for _ in range(50)])
    assert sorted(epochs) == list(range(1, 51))


async def test_an_epoch_counter_ends_with_its_ttl(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.state.memory.EPOCH_TTL_S", 1)
    monkeypatch.setattr("common.state.redis.EPOCH_TTL_S", 1)
    assert [await subject.store.next_epoch(RequestId("r")) for _ in range(2)] == [1, 2]
    await subject.pass_time(1.2)
    assert await subject.store.next_epoch(RequestId("r")) == 1


@pytest.mark.parametrize("state", JOURNAL_STATES)
async def test_a_journal_entry_comes_back_field_for_field(subject: Subject, state: str) -> None:
    written = replace(
        entry("r", state), prefill_worker="p", decode_worker="d", num_prompt_tokens=9, num_tokens=4, error_kind="KVCorrupt"
    )
    assert await subject.store.write_journal(written, 30.0)
    assert await subject.store.read_journal(RequestId("r")) == written


async def test_what_was_never_written_reads_as_nothing(subject: Subject) -> None:
    assert await subject.store.read_journal(RequestId("r")) is None
    assert await subject.store.list_journal() == []


async def test_a_journal_entry_of_an_older_epoch_is_refused(subject: Subject) -> None:
    assert await subject.store.write_journal(entry("r", epoch=2), 30.0)
    assert not await subject.store.write_journal(entry("r", epoch=1, updated=9.0), 30.0)
    assert await subject.store.write_journal(entry("r", epoch=2, updated=3.0), 30.0)
    assert await subject.store.read_journal(RequestId("r")) == entry("r", epoch=2, updated=3.0)


@pytest.mark.parametrize("final", sorted(contract.FINAL_JOURNAL_STATES))
async def test_a_final_journal_entry_stays_whatever_comes_later(subject: Subject, final: str) -> None:
    assert await subject.store.write_journal(entry("r", final), 30.0)
    assert not await subject.store.write_journal(entry("r", "streaming", epoch=5), 30.0)
    assert await subject.store.read_journal(RequestId("r")) == entry("r", final)


async def test_the_journal_lists_the_newest_first_and_at_most_the_limit(subject: Subject) -> None:
    for number in range(6):
        await subject.store.write_journal(entry(f"r{number}", updated=float(number)), 30.0)
    await subject.store.write_journal(entry("r1", "finished", updated=10.0), 30.0)
    assert [e.request_id for e in await subject.store.list_journal()] == ["r1", "r5", "r4", "r3", "r2", "r0"]
    assert [e.request_id for e in await subject.store.list_journal(2)] == ["r1", "r5"]
    assert await subject.store.list_journal(0) == []


async def test_an_expired_journal_entry_is_gone_from_reads_and_listings(subject: Subject) -> None:
    await subject.store.write_journal(entry("short", updated=2.0), 0.2)
    await subject.store.write_journal(entry("long", updated=1.0), 30.0)
    await subject.pass_time(0.4)
    assert await subject.store.read_journal(RequestId("short")) is None
    assert [e.request_id for e in await subject.store.list_journal()] == ["long"]
    assert await subject.store.write_journal(entry("short", updated=3.0), 30.0), "an expired entry refuses nothing"


async def test_the_journals_listing_is_bounded(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.state.memory.JOURNAL_ENTRIES_MAX", 5)
    monkeypatch.setattr("common.state.redis.JOURNAL_ENTRIES_MAX", 5)
    for number in range(12):
        await subject.store.write_journal(entry(f"r{number:02}", updated=float(number)), 30.0)
    assert [e.request_id for e in await subject.store.list_journal()] == [f"r{number:02}" for number in range(11, 6, -1)]
    await subject.store.write_journal(entry("r07", updated=20.0), 30.0)
    await subject.store.write_journal(entry("r12", updated=21.0), 30.0)
    listed = [e.request_id for e in await subject.store.list_journal()]
    assert listed == ["r12", "r07", "r11", "r10", "r09"], "what was updated last leaves last"


async def test_a_store_that_answers_pings_true(subject: Subject) -> None:
    assert await subject.store.ping() is True


# Redis alone ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def own_store(own_server: EmbeddedRedis) -> AsyncIterator[RedisStateStore]:
    store = RedisStateStore(own_server.url, "own", timeout_s=0.5)
    await store.start()
    yield store
    with contextlib.suppress(ProcessLookupError):
        os.kill(own_server.pid, signal.SIGCONT)
    await store.close()
    assert not store._under_way, "a command outlived close"


async def test_clusters_do_not_see_each_other(own_server: EmbeddedRedis, own_store: RedisStateStore) -> None:
    other = RedisStateStore(own_server.url, "other")
    await own_store.publish_worker(worker("a"), CENSUS, 30.0)
    await own_store.write_journal(entry("r"), 30.0)
    await own_store.next_epoch(RequestId("r"))
    assert await other.list_workers() == []
    assert await other.list_journal() == []
    assert await other.next_epoch(RequestId("r")) == 1
    await other.close()


async def test_every_key_is_under_the_cluster_and_has_a_ttl(own_server: EmbeddedRedis, own_store: RedisStateStore) -> None:
    await own_store.publish_worker(worker("a"), CENSUS, 30.0)
    await own_store.write_journal(entry("r"), 30.0)
    await own_store.next_epoch(RequestId("r"))
    ttls_ms = await keys_of(own_server.url, "own")
    assert sorted(key.removeprefix("{own}:") for key in ttls_ms) == [
        "epoch:r", "journal", "journal:r", "orders:a", "worker:a", "workers",
    ]  # fmt: skip
    assert all(0 < ttl_ms <= 86_400_000 for ttl_ms in ttls_ms.values()), ttls_ms
    assert ttls_ms["{own}:epoch:r"] > 3_500_000
    client = redis.asyncio.Redis.from_url(own_server.url)
    assert await client.dbsize() == len(ttls_ms), "keys outside the cluster's name"
    await client.aclose()


async def test_the_journals_index_lives_as_long_as_its_longest_entry(
    own_server: EmbeddedRedis, own_store: RedisStateStore
) -> None:
    await own_store.write_journal(entry("long"), 500.0)
    await own_store.write_journal(entry("short"), 5.0)
    assert (await keys_of(own_server.url, "own"))["{own}:journal"] > 400_000


async def test_values_of_another_version_are_skipped_not_fatal(own_server: EmbeddedRedis, own_store: RedisStateStore) -> None:
    await own_store.publish_worker(worker("a"), CENSUS, 30.0)
    await own_store.publish_worker(worker("b"), CENSUS, 30.0)
    await own_store.write_journal(entry("r"), 30.0)
    client = redis.asyncio.Redis.from_url(own_server.url)
    await client.hset("{own}:worker:a", mapping={"record": '{"worker_id":"a"}', "census": "[]"})
    await client.hset("{own}:journal:r", "entry", "not json")
    await client.aclose()
    assert [info.worker_id for info in await own_store.list_workers()] == ["b"]
    assert list(await own_store.block_ownership()) == ["b"]
    assert await own_store.read_journal(RequestId("r")) is None
    assert await own_store.list_journal() == []


OPERATIONS: dict[str, Callable[[StateStore], Awaitable[object]]] = {
    "publish_worker": lambda store: store.publish_worker(worker("a"), CENSUS, 30.0),
    "remove_worker": lambda store: store.remove_worker(WorkerId("a"), "first"),
    "list_workers": lambda store: store.list_workers(),
    "block_ownership": lambda store: store.block_ownership(),
    "next_epoch": lambda store: store.next_epoch(RequestId("r")),
    "write_journal": lambda store: store.write_journal(entry("r"), 30.0),
    "read_journal": lambda store: store.read_journal(RequestId("r")),
    "list_journal": lambda store: store.list_journal(),
}


@pytest.mark.parametrize("is_connected", [True, False], ids=["open_connection", "new_connection"])
async def test_a_hung_store_is_unavailable_within_the_timeout_and_usable_afterwards(
    own_server: EmbeddedRedis, own_store: RedisStateStore, is_connected: bool
) -> None:
    if is_connected:
        assert await own_store.ping()
    os.kill(own_server.pid, signal.SIGSTOP)

    async def outcome(operation: Callable[[StateStore], Awaitable[object]]) -> tuple[BaseException | None, float]:
        start = time.monotonic()
        try:
            await operation(own_store)
        except StoreUnavailable as error:
            return error, time.monotonic() - start
        return None, time.monotonic() - start

    outcomes = await asyncio.gather(*[outcome(operation) for operation in OPERATIONS.values()])
    for name, (error, seconds) in zip(OPERATIONS, outcomes, strict=True):
        assert isinstance(error, StoreUnavailable), name
        assert seconds < 0.5 + 0.4, name
    assert await own_store.ping() is False
    os.kill(own_server.pid, signal.SIGCONT)
    for number in range(1, 20):
        await own_store.write_journal(entry(f"r{number}", updated=float(number)), 30.0)
        assert await own_store.read_journal(RequestId(f"r{number}")) == entry(f"r{number}", updated=float(number))


async def test_more_commands_than_may_wait_are_refused_at_once(own_server: EmbeddedRedis, own_store: RedisStateStore) -> None:
    assert await own_store.ping()
    os.kill(own_server.pid, signal.SIGSTOP)
    start = time.monotonic()
    results = await asyncio.gather(*[own_store.read_journal(RequestId("r")) for _ in range(600)], return_exceptions=True)
    assert all(isinstance(result, StoreUnavailable) for result in results)
    assert sum("commands wait for the store already" in str(result) for result in results) == 600 - COMMANDS_MAX
    assert time.monotonic() - start < 2.0, "the waits must not add up"
    os.kill(own_server.pid, signal.SIGCONT)
    assert await asyncio.gather(*[own_store.next_epoch(RequestId("r")) for _ in range(40)])
    assert own_store._client.connection_pool.max_connections == 32


async def test_a_store_that_is_not_there_is_unavailable_at_once(tmp_path: object) -> None:
    store = RedisStateStore(f"unix://{tmp_path}/nobody.sock", "own", timeout_s=5.0)
    start = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await store.list_workers()
    assert await store.ping() is False
    assert time.monotonic() - start < 2.0
    await store.close()


async def test_a_store_that_comes_back_empty_is_filled_by_the_next_heartbeat(
    own_server: EmbeddedRedis, own_store: RedisStateStore
) -> None:
    await own_store.publish_worker(worker("a"), CENSUS, 30.0)
    client = redis.asyncio.Redis.from_url(own_server.url)
    await client.flushall()
    await client.script_flush()
    await client.aclose()
    assert await own_store.list_workers() == []
    assert await own_store.publish_worker(worker("a"), CENSUS, 30.0), "the scripts too are loaded again"
    assert await own_store.list_workers() == [worker("a")]


async def test_connections_that_the_server_dropped_cost_no_error(own_server: EmbeddedRedis, own_store: RedisStateStore) -> None:
    await asyncio.gather(*[own_store.next_epoch(RequestId("r")) for _ in range(10)])
    client = redis.asyncio.Redis.from_url(own_server.url)
    await client.client_kill_filter(_type="normal", skipme=True)
    await client.aclose()
    assert await own_store.publish_worker(worker("a"), CENSUS, 30.0)
    assert await own_store.list_workers() == [worker("a")]


async def test_a_connection_that_breaks_under_a_command_costs_one_more_try_and_no_error(
    own_server: EmbeddedRedis, own_store: RedisStateStore, tmp_path: object
) -> None:
    await own_store.write_journal(entry("r"), 30.0)
    num_breaks = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Request and reply in turn; the first look-up is swallowed and the connection closed."""
        nonlocal num_breaks
        up_reader, up_writer = await asyncio.open_unix_connection(own_server.url.removeprefix("unix://"))
        while data := await reader.read(65536):
            if b"HGET" in data and num_breaks == 0:
                num_breaks += 1
                break
            up_writer.write(data)
            writer.write(await up_reader.read(65536))
        for end in (writer, up_writer):
            end.close()

    server = await asyncio.start_unix_server(serve, f"{tmp_path}/breaking.sock")
    async with server:
        store = RedisStateStore(f"unix://{tmp_path}/breaking.sock", "own", timeout_s=5.0)
        assert await store.read_journal(RequestId("r")) == entry("r")
        assert num_breaks == 1
        await store.close()


@pytest.mark.parametrize("hangs", [False, True], ids=["slow", "slow_and_hanging"])
async def test_no_reply_goes_to_another_key_when_waiting_tasks_are_cancelled(
    own_server: EmbeddedRedis, tmp_path: object, hangs: bool
) -> None:
    """Fault A29: a cancelled command's reply must never be read by the next command on that connection."""
    random = Random(29)
    names = [f"r{number}" for number in range(50)]
    async with SlowProxy(own_server.url.removeprefix("unix://"), f"{tmp_path}/slow.sock", random) as proxy:
        store = RedisStateStore(f"unix://{proxy.path}", "own", timeout_s=2.0)
        for number, name in enumerate(names):
            assert await store.write_journal(entry(name, updated=float(number)), 300.0)
        num_right = num_cancelled = num_unavailable = 0

        async def look() -> tuple[str, JournalEntry | None]:
            name = random.choice(names)
            return name, await store.read_journal(RequestId(name))

        for round_number in range(60):
            tasks = [asyncio.create_task(look()) for _ in range(40)]
            if hangs and round_number % 20 == 10:
                os.kill(own_server.pid, signal.SIGSTOP)
                asyncio.get_running_loop().call_later(0.2, os.kill, own_server.pid, signal.SIGCONT)
            for task in random.sample(tasks, 8):
                asyncio.get_running_loop().call_later(random.random() * 0.01, task.cancel)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, asyncio.CancelledError):
                    num_cancelled += 1
                elif isinstance(result, StoreUnavailable):
                    num_unavailable += 1
                else:
                    assert not isinstance(result, BaseException), result
                    name, found = result
                    assert found is not None and found.request_id == name
                    num_right += 1
        assert num_cancelled > 100 and num_right > 1500, (num_cancelled, num_right, num_unavailable)
        assert num_unavailable == 0, "two seconds are enough for each of them"
        await store.close()


async def test_a_cancelled_callers_command_is_carried_out_all_the_same(
    own_server: EmbeddedRedis, own_store: RedisStateStore
) -> None:
    assert await own_store.ping()
    os.kill(own_server.pid, signal.SIGSTOP)
    task = asyncio.create_task(own_store.write_journal(entry("r", "cancelled"), 30.0))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    os.kill(own_server.pid, signal.SIGCONT)
    await asyncio.gather(*own_store._under_way)
    assert await own_store.read_journal(RequestId("r")) == entry("r", "cancelled")


# open_store -----------------------------------------------------------------------------------------------------------


async def test_the_url_chooses_the_store() -> None:
    assert isinstance(open_store("memory://", "c"), MemoryStateStore)
    assert isinstance(open_store("redis://127.0.0.1:1/0", "c"), RedisStateStore)


def test_an_unknown_url_is_refused_without_its_password() -> None:
    with pytest.raises(ValueError, match="redis://") as caught:
        open_store("http://user:hunter2@host", "c")
    assert "hunter2" not in str(caught.value)
