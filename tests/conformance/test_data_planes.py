"""One suite for the data planes. The first half runs both ends in this process on all three; the second half has the
peer in a process of its own, where it can be killed, stopped and measured: tcp, ucx, and ucx with reads emulated over
TCP (`ucx-emulated`), where a hung peer really leaves a read in flight."""

from __future__ import annotations

import asyncio
import base64
import gc
import mmap
import os
import random
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import pytest
import pytest_asyncio

from common.errors import HandoffFailed, InvalidRequest
from kvtransfer.data_plane import DataPlane, Fetch
from kvtransfer.planes.description import seal_description
from kvtransfer.planes.fetches import FETCHES_MAX
from kvtransfer.planes.select import available_planes, open_plane
from tests.fakes.plane_peer import SECRET, pattern

KIB, MIB = 1 << 10, 1 << 20


def schemes(*names: str) -> list[object]:
    missing = available_planes()
    marks = {
        name: pytest.mark.skipif(bool(missing[name.split("-")[0]]), reason=f"{name}: {missing[name.split('-')[0]]}")
        for name in names
    }
    return [pytest.param(name, marks=marks[name]) for name in names]


@dataclass
class End:
    """A plane with its region, in this process."""

    plane: DataPlane
    region: mmap.mmap
    bytes: np.ndarray

    @staticmethod
    async def open(scheme: str, name: str, num_bytes: int, seed: int | None = None) -> End:
        region = mmap.mmap(-1, num_bytes)
        if seed is not None:
            region[:] = pattern(num_bytes, seed).tobytes()
        plane = open_plane(scheme, name=name, secret=SECRET)
        await plane.start(memoryview(region))
        return End(plane, region, np.frombuffer(region, np.uint8))

    async def close(self) -> None:
        await self.plane.close()
        self.bytes = np.empty(0, np.uint8)


Opener = Callable[..., Awaitable[End]]


@pytest.fixture(params=schemes("inproc", "tcp", "ucx"))
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def opener(scheme: str) -> AsyncIterator[Opener]:
    ends: list[End] = []

    async def open_end(name: str, num_bytes: int, seed: int | None = None) -> End:
        ends.append(await End.open(scheme, name, num_bytes, seed))
        return ends[-1]

    yield open_end
    async with asyncio.timeout(20):
        for end in ends:
            await end.close()


async def outcome(fetch: Fetch, within_s: float = 10.0) -> BaseException | None:
    """Waits until the fetch has settled; returns the error of `done`. Checks that the outcome came first."""
    done, pending = await asyncio.wait([fetch.settled], timeout=within_s)
    assert not pending, "the fetch did not settle"
    assert fetch.done.done()
    assert fetch.settled.result() is None
    return asyncio.CancelledError() if fetch.done.cancelled() else fetch.done.exception()


# --- both ends in one process -------------------------------------------------------------------------------------


async def test_fetch_brings_exactly_the_bytes_asked_for(opener: Opener) -> None:
    size = 3 * MIB + 17
    reader, source = await opener("d@1", size), await opener("p@1", size, seed=1)
    await reader.plane.connect("p@1", source.plane.describe())
    chance = random.Random(7)
    cases = [
        (0, 0, 1),
        (size - 1, size - 1, 1),
        (0, size - 1, 1),
        (0, 0, size),
        (1, 3, size - 3),
        (4095, 8191, 4097),
        (13, 0, MIB),
    ]
    for _ in range(40):
        num_bytes = chance.randint(1, chance.choice((64, 5000, size)))
        cases.append((chance.randint(0, size - num_bytes), chance.randint(0, size - num_bytes), num_bytes))
    for remote, local, num_bytes in cases:
        reader.bytes[:] = 0xA5
        fetch = reader.plane.fetch("p@1", remote, local, num_bytes)
        assert await fetch.done >= 0
        assert await outcome(fetch) is None
        assert np.array_equal(reader.bytes[local : local + num_bytes], source.bytes[remote : remote + num_bytes])
        assert (reader.bytes[:local] == 0xA5).all() and (reader.bytes[local + num_bytes :] == 0xA5).all()


async def test_fetch_of_64_mib_is_right_and_leaves_the_event_loop_alive(opener: Opener) -> None:
    size = 64 * MIB
    reader, source = await opener("d@1", size), await opener("p@1", size, seed=2)
    await reader.plane.connect("p@1", source.plane.describe())
    fetch = reader.plane.fetch("p@1", 0, 0, size)
    turns = 0
    while not fetch.done.done():
        await asyncio.sleep(0)
        turns += 1
    assert await outcome(fetch) is None
    assert turns >= 5
    assert np.array_equal(reader.bytes, source.bytes)


async def test_many_concurrent_fetches_from_many_peers_do_not_mix(opener: Opener) -> None:
    piece, pieces, peers = 96 * KIB + 1, 16, 6
    reader = await opener("d@1", piece * pieces * peers)
    sources = [await opener(f"p{n}@1", piece * pieces, seed=100 + n) for n in range(peers)]
    await asyncio.gather(*(reader.plane.connect(f"p{n}@1", s.plane.describe()) for n, s in enumerate(sources)))
    plan = [(n, k) for n in range(peers) for k in range(pieces)]
    random.Random(3).shuffle(plan)
    fetches = [reader.plane.fetch(f"p{n}@1", k * piece, (n * pieces + k) * piece, piece) for n, k in plan]
    assert [await outcome(fetch) for fetch in fetches] == [None] * len(fetches)
    assert np.array_equal(reader.bytes, np.concatenate([source.bytes for source in sources]))


async def test_two_planes_read_each_other_at_the_same_time(opener: Opener) -> None:
    size = 2 * MIB
    left, right = await opener("a@1", 2 * size, seed=5), await opener("b@1", 2 * size, seed=6)
    await asyncio.gather(left.plane.connect("b@1", right.plane.describe()), right.plane.connect("a@1", left.plane.describe()))
    fetches = [left.plane.fetch("b@1", 0, size, size), right.plane.fetch("a@1", 0, size, size)]
    assert [await outcome(fetch) for fetch in fetches] == [None, None]
    assert np.array_equal(left.bytes[size:], right.bytes[:size]) and np.array_equal(right.bytes[size:], left.bytes[:size])


async def test_ranges_outside_of_a_region_are_refused(opener: Opener) -> None:
    reader, source = await opener("d@1", 8 * KIB), await opener("p@1", 16 * KIB, seed=3)
    await reader.plane.connect("p@1", source.plane.describe())
    reader.bytes[:] = 0
    outside = [(16 * KIB, 0, 1), (16 * KIB - 1, 0, 2), (0, 8 * KIB, 1), (0, 8 * KIB - 1, 2), (0, 0, 8 * KIB + 1)]
    nonsense = [(-1, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, -1), (1 << 64, 0, 1), (0, 1 << 64, 1)]
    for remote, local, num_bytes in outside + nonsense:
        with pytest.raises(HandoffFailed):
            reader.plane.fetch("p@1", remote, local, num_bytes)
    assert not reader.bytes.any()
    assert await outcome(reader.plane.fetch("p@1", 8 * KIB, 0, 8 * KIB)) is None


async def test_unknown_and_already_known_peers_are_refused(opener: Opener) -> None:
    reader, source = await opener("d@1", 4 * KIB), await opener("p@1", 4 * KIB, seed=3)
    with pytest.raises(HandoffFailed, match="p@1"):
        reader.plane.fetch("p@1", 0, 0, 1)
    await reader.plane.connect("p@1", source.plane.describe())
    with pytest.raises(HandoffFailed, match="p@1"):
        await reader.plane.connect("p@1", source.plane.describe())
    with pytest.raises(HandoffFailed, match="p@2"):
        reader.plane.fetch("p@2", 0, 0, 1)
    assert await outcome(reader.plane.fetch("p@1", 0, 0, 1)) is None


async def test_number_of_running_fetches_is_bounded(opener: Opener) -> None:
    reader, source = await opener("d@1", 4 * KIB), await opener("p@1", 4 * KIB, seed=3)
    await reader.plane.connect("p@1", source.plane.describe())
    fetches = []
    with pytest.raises(HandoffFailed, match=str(FETCHES_MAX)):
        for _ in range(FETCHES_MAX + 1):
            fetches.append(reader.plane.fetch("p@1", 0, 0, 4 * KIB))
    assert len(fetches) == FETCHES_MAX
    assert {await outcome(fetch) for fetch in fetches} == {None}
    assert await outcome(reader.plane.fetch("p@1", 0, 0, 4 * KIB)) is None


async def test_caller_who_cancels_done_still_learns_when_it_settled(opener: Opener) -> None:
    size = 16 * MIB
    reader, source = await opener("d@1", size), await opener("p@1", size, seed=4)
    await reader.plane.connect("p@1", source.plane.describe())
    fetches = [reader.plane.fetch("p@1", 0, 0, size) for _ in range(8)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fetches[0].done, timeout=0)
    for fetch in fetches[1:]:
        fetch.done.cancel()
    assert {type(await outcome(fetch)) for fetch in fetches} <= {asyncio.CancelledError, type(None)}
    reader.bytes[:] = 0
    await asyncio.sleep(0.05)
    assert not reader.bytes.any(), "memory was written after the fetch had settled"
    assert await outcome(reader.plane.fetch("p@1", 0, 0, size)) is None
    assert np.array_equal(reader.bytes, source.bytes)


async def test_disconnect_is_idempotent_fails_running_fetches_and_allows_a_new_connection(opener: Opener) -> None:
    size = 16 * MIB
    reader, source = await opener("d@1", 2 * size), await opener("p@1", size, seed=4)
    other = await opener("q@1", 4 * KIB, seed=9)
    await reader.plane.connect("p@1", source.plane.describe())
    await reader.plane.connect("q@1", other.plane.describe())
    fetches = [reader.plane.fetch("p@1", 0, 0, size) for _ in range(8)]
    await reader.plane.disconnect("p@1")
    await reader.plane.disconnect("p@1")
    await reader.plane.disconnect("never known")
    errors = [await outcome(fetch, 5) for fetch in fetches]
    assert all(isinstance(error, HandoffFailed) for error in errors if error is not None) and isinstance(
        errors[-1], HandoffFailed
    )
    with pytest.raises(HandoffFailed):
        reader.plane.fetch("p@1", 0, 0, 1)
    assert await outcome(reader.plane.fetch("q@1", 0, 0, 4 * KIB)) is None
    await reader.plane.connect("p@1", source.plane.describe())
    assert await outcome(reader.plane.fetch("p@1", 0, size, size)) is None
    assert np.array_equal(reader.bytes[size:], source.bytes)


async def test_damaged_or_foreign_description_is_refused_and_harms_no_good_peer(scheme: str, opener: Opener) -> None:
    reader, source = await opener("d@1", 64 * KIB), await opener("p@1", 64 * KIB, seed=8)
    other = await opener("q@1", 64 * KIB, seed=9)
    await reader.plane.connect("p@1", source.plane.describe())
    good = other.plane.describe()
    assert len(good) <= 64 * KIB
    bad = [b"", b"\0" * 200, os.urandom(500), good[:50], good[:-1], good + b"\0", b"X" * (65 * KIB)]
    bad += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(0, len(good), 11)]
    bad.append(seal_description(scheme, b"another cluster", b"payload"))
    bad.append(seal_description("other", SECRET, b"payload"))
    bad.append(seal_description(scheme, SECRET, b"short"))
    for description in bad:
        with pytest.raises(HandoffFailed):
            await reader.plane.connect("q@1", description)
    assert await outcome(reader.plane.fetch("p@1", 0, 0, 64 * KIB)) is None
    assert np.array_equal(reader.bytes, source.bytes)
    await reader.plane.connect("q@1", good)
    assert await outcome(reader.plane.fetch("q@1", 0, 0, 64 * KIB)) is None
    assert np.array_equal(reader.bytes, other.bytes)


async def test_close_ends_running_fetches_and_leaves_no_thread_socket_or_view(scheme: str) -> None:
    async def cycle() -> None:
        size = 8 * MIB
        reader, source = await End.open(scheme, "d@1", size), await End.open(scheme, "p@1", size, seed=4)
        await reader.plane.connect("p@1", source.plane.describe())
        fetches = [reader.plane.fetch("p@1", 0, 0, size) for _ in range(20)]
        started = time.monotonic()
        await reader.close()
        assert time.monotonic() - started < 5
        assert all(fetch.settled.done() for fetch in fetches)
        assert isinstance(fetches[-1].done.exception(), HandoffFailed)
        await reader.plane.close()
        with pytest.raises(HandoffFailed):
            reader.plane.fetch("p@1", 0, 0, 1)
        await source.close()
        with pytest.raises(HandoffFailed):
            source.plane.describe()
        gc.collect()  # a socket error of asyncio holds its buffer in a reference cycle
        reader.region.close()  # raises BufferError if anything still holds a view
        source.region.close()

    await cycle()  # what a library opens once per process does not count
    fds, threads, tasks = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(asyncio.all_tasks())
    await cycle()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert len(os.listdir("/proc/self/task")) == threads
    assert len(asyncio.all_tasks()) == tasks
    assert not [thread for thread in threading.enumerate() if "plane" in thread.name]


async def test_a_plane_starts_once(opener: Opener) -> None:
    end = await opener("d@1", 4 * KIB)
    with pytest.raises(HandoffFailed):
        await end.plane.start(memoryview(end.region))


def test_unknown_scheme_is_refused_with_the_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_plane("carrier-pigeon", name="d@1", secret=SECRET)
    assert caught.value.param == "transport"


# --- the peer in a process of its own -----------------------------------------------------------------------------


@dataclass
class Peer:
    process: asyncio.subprocess.Process
    description: bytes
    bytes: np.ndarray

    @staticmethod
    async def spawn(scheme: str, name: str, num_bytes: int, seed: int) -> Peer:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.fakes.plane_peer", scheme, name, str(num_bytes), str(seed),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(30):
                description = base64.b64decode(await process.stdout.readline())
            assert description, "the peer process ended early"
        except BaseException:
            process.kill()
            await process.wait()
            raise
        return Peer(process, description, pattern(num_bytes, seed))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def say(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line.encode() + b"\n")
        async with asyncio.timeout(20):
            return (await self.process.stdout.readline()).decode().strip()

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        self.process._transport.close()  # type: ignore[attr-defined]

    def cpu_s(self) -> float:
        with open(f"/proc/{self.process.pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class World:
    """A reading plane in this process and any number of peers in others, all on one transport."""

    variant: str
    reader: End
    peers: list[Peer]

    async def spawn(self, name: str, num_bytes: int, seed: int) -> Peer:
        self.peers.append(await Peer.spawn(self.variant.split("-")[0], name, num_bytes, seed))
        return self.peers[-1]


REGION = 32 * MIB


@pytest.fixture(params=schemes("tcp", "ucx", "ucx-emulated"))
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "ucx-emulated":
        monkeypatch.setenv("UCX_TLS", "tcp")
    else:
        monkeypatch.delenv("UCX_TLS", raising=False)
    return str(request.param)


@pytest_asyncio.fixture
async def world(variant: str) -> AsyncIterator[World]:
    world = World(variant, await End.open(variant.split("-")[0], "d@1", REGION), [])
    yield world
    try:
        async with asyncio.timeout(10):
            await world.reader.close()
    finally:
        for peer in world.peers:
            await peer.end()


async def test_bytes_cross_processes(world: World) -> None:
    peer = await world.spawn("p@1", REGION, seed=21)
    plane = world.reader.plane
    await plane.connect("p@1", peer.description)
    for remote, local, num_bytes in [(0, 0, 1), (REGION - 1, 7, 1), (4097, 13, 123_457), (0, 0, REGION)]:
        world.reader.bytes[:] = 0
        assert await outcome(plane.fetch("p@1", remote, local, num_bytes)) is None
        assert np.array_equal(world.reader.bytes[local : local + num_bytes], peer.bytes[remote : remote + num_bytes])
        assert world.reader.bytes.sum(dtype=np.int64) == peer.bytes[remote : remote + num_bytes].sum(dtype=np.int64)
    world.reader.bytes[:] = 0
    places = list(range(REGION // MIB))
    random.Random(1).shuffle(places)
    fetches = [plane.fetch("p@1", k * MIB, k * MIB, MIB) for k in places]
    assert {await outcome(fetch) for fetch in fetches} == {None}
    assert np.array_equal(world.reader.bytes, peer.bytes)
    assert await peer.say("close") == "closed"
    assert await asyncio.wait_for(peer.process.wait(), 10) == 0


async def test_peer_killed_mid_fetch_fails_the_rest_and_a_new_incarnation_works(world: World) -> None:
    """Enough is queued behind the first read that a loaded machine cannot have finished it all before the kill."""
    peer = await world.spawn("p@1", REGION, seed=22)
    plane = world.reader.plane
    await plane.connect("p@1", peer.description)
    fetches = [plane.fetch("p@1", 0, 0, REGION) for _ in range(1000)]
    await fetches[0].done
    peer.signal(signal.SIGKILL)
    errors = [await outcome(fetch, 10.0) for fetch in fetches]
    assert errors[0] is None and isinstance(errors[-1], HandoffFailed)
    assert all(error is None or isinstance(error, HandoffFailed) for error in errors)
    with pytest.raises(HandoffFailed):
        await plane.fetch("p@1", 0, 0, 4 * KIB).done
    await plane.disconnect("p@1")
    again = await world.spawn("p@2", REGION, seed=23)
    await plane.connect("p@2", again.description)
    assert await outcome(plane.fetch("p@2", 0, 0, REGION)) is None
    assert np.array_equal(world.reader.bytes, again.bytes)


async def test_fetch_from_a_stopped_peer_can_be_abandoned_and_settles_only_when_it_ended(world: World) -> None:
    peer = await world.spawn("p@1", REGION, seed=24)
    plane = world.reader.plane
    await plane.connect("p@1", peer.description)
    peer.signal(signal.SIGSTOP)
    fetch = plane.fetch("p@1", 0, 0, REGION)
    if world.variant == "ucx":
        assert await outcome(fetch) is None  # the kernel copies from a stopped process, too
        assert np.array_equal(world.reader.bytes, peer.bytes)
        return
    await asyncio.wait([fetch.done], timeout=0.5)
    assert not fetch.done.done()
    fetch.done.cancel()
    await asyncio.wait([fetch.settled], timeout=0.5)
    assert not fetch.settled.done()
    peer.signal(signal.SIGCONT)
    await outcome(fetch)
    world.reader.bytes[:] = 0
    await asyncio.sleep(0.2)
    assert not world.reader.bytes.any(), "memory was written after the fetch had settled"
    assert await outcome(plane.fetch("p@1", 0, 0, REGION)) is None
    assert np.array_equal(world.reader.bytes, peer.bytes)


async def test_disconnect_from_a_stopped_peer_is_quick_and_settled_stays_honest(world: World) -> None:
    peer = await world.spawn("p@1", REGION, seed=25)
    good = await world.spawn("q@1", MIB, seed=26)
    plane = world.reader.plane
    await plane.connect("p@1", peer.description)
    await plane.connect("q@1", good.description)
    peer.signal(signal.SIGSTOP)
    fetches = [plane.fetch("p@1", 0, 0, REGION // 2) for _ in range(3)]
    await asyncio.wait([fetches[0].done], timeout=0.2)
    async with asyncio.timeout(1):
        await plane.disconnect("p@1")
    for fetch in fetches:
        await asyncio.wait([fetch.done], timeout=1)
        assert fetch.done.done()
    if world.variant == "ucx-emulated":
        await asyncio.wait([fetch.settled for fetch in fetches], timeout=0.5)
        assert not fetches[0].settled.done(), "the library may still write there"
    else:
        assert {type(await outcome(fetch, 1)) for fetch in fetches} <= {HandoffFailed, type(None)}
    assert await outcome(plane.fetch("q@1", 0, REGION - MIB, MIB)) is None  # others are served meanwhile
    peer.signal(signal.SIGCONT)
    for fetch in fetches:
        await outcome(fetch)
    await plane.connect("p@1", peer.description)
    assert await outcome(plane.fetch("p@1", 0, 0, REGION)) is None
    assert np.array_equal(world.reader.bytes, peer.bytes)


async def test_close_while_a_stopped_peer_holds_a_fetch_is_bounded_and_settles(world: World) -> None:
    peer = await world.spawn("p@1", REGION, seed=27)
    await world.reader.plane.connect("p@1", peer.description)
    peer.signal(signal.SIGSTOP)
    fetch = world.reader.plane.fetch("p@1", 0, 0, REGION)
    await asyncio.wait([fetch.done], timeout=0.2)
    started = time.monotonic()
    await world.reader.plane.close()
    assert time.monotonic() - started < 5
    assert fetch.settled.done()
    world.reader.bytes[:] = 0
    peer.signal(signal.SIGCONT)
    await asyncio.sleep(0.3)
    assert not world.reader.bytes.any(), "memory was written after the plane had closed"


async def test_connecting_to_a_stopped_peer_fails_in_time_and_can_be_tried_again(world: World) -> None:
    peer, good = await world.spawn("p@1", MIB, seed=28), await world.spawn("q@1", MIB, seed=29)
    plane = world.reader.plane
    await plane.connect("q@1", good.description)
    peer.signal(signal.SIGSTOP)
    started = time.monotonic()
    attempt = asyncio.create_task(plane.connect("p@1", peer.description))
    assert await outcome(plane.fetch("q@1", 0, 0, MIB)) is None
    with pytest.raises(HandoffFailed, match="did not answer"):
        await attempt
    assert time.monotonic() - started < 5
    with pytest.raises(HandoffFailed):
        plane.fetch("p@1", 0, 0, 1)
    peer.signal(signal.SIGCONT)
    async with asyncio.timeout(10):
        while True:  # the first attempt may still have to end on the other side
            try:
                await plane.connect("p@1", peer.description)
                break
            except HandoffFailed:
                await asyncio.sleep(0.05)
    assert await outcome(plane.fetch("p@1", 0, 0, MIB)) is None
    assert np.array_equal(world.reader.bytes[:MIB], peer.bytes)


async def test_connecting_to_a_dead_peer_fails_at_once(world: World) -> None:
    peer = await world.spawn("p@1", MIB, seed=28)
    await peer.end()
    async with asyncio.timeout(5):
        with pytest.raises(HandoffFailed):
            await world.reader.plane.connect("p@1", peer.description)


async def test_idle_planes_with_a_connection_burn_under_three_percent_of_a_core(world: World) -> None:
    peer = await world.spawn("p@1", MIB, seed=30)
    await world.reader.plane.connect("p@1", peer.description)
    assert await outcome(world.reader.plane.fetch("p@1", 0, 0, MIB)) is None
    await asyncio.sleep(0.2)
    cpu, own, started = peer.cpu_s(), time.process_time(), time.monotonic()
    await asyncio.sleep(2)
    elapsed = time.monotonic() - started
    assert (peer.cpu_s() - cpu) / elapsed < 0.03
    assert (time.process_time() - own) / elapsed < 0.03


@pytest.mark.parametrize("scheme", schemes("tcp", "ucx"))
async def test_a_reader_that_dies_mid_read_does_not_harm_the_target(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    target = await Peer.spawn(scheme, "p@1", REGION, seed=31)
    readers: list[Peer] = []
    reader = await End.open(scheme, "d@9", REGION)
    try:
        for n in range(4):
            readers.append(await Peer.spawn(scheme, f"d@{n}", REGION, seed=n))
            assert await readers[-1].say(f"read {base64.b64encode(target.description).decode()}") == "reading"
            await asyncio.sleep(0.03 * n)
            readers[-1].signal(signal.SIGKILL)
            await readers[-1].process.wait()
        await reader.plane.connect("p@1", target.description)
        assert await outcome(reader.plane.fetch("p@1", 0, 0, REGION)) is None
        assert np.array_equal(reader.bytes, target.bytes)
        assert target.process.returncode is None
    finally:
        await reader.close()
        for peer in (target, *readers):
            await peer.end()


@pytest.mark.parametrize("scheme", schemes("ucx"))
async def test_ucx_refuses_a_peer_that_it_could_only_read_by_emulation(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    peer = await Peer.spawn(scheme, "p@1", MIB, seed=32)
    reader = await End.open(scheme, "d@1", MIB)
    try:
        monkeypatch.setattr("kvtransfer.planes.read_path._try_read", lambda pid, address: 1)
        with pytest.raises(HandoffFailed, match="not permitted.*use the tcp data plane"):
            await reader.plane.connect("p@1", peer.description)
        monkeypatch.undo()
        await reader.plane.connect("p@1", peer.description)
        assert await outcome(reader.plane.fetch("p@1", 0, 0, MIB)) is None
    finally:
        await reader.close()
        await peer.end()
