"""The control link against wrong secrets, wrong versions, other layouts, tampering, garbage and silence.

Real sockets on loopback; a small proxy changes or swallows bytes between the two ends. Times are seconds.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from common.clock import SystemClock
from common.errors import HandoffFailed, LayoutMismatch
from kvtransfer import link_handshake
from kvtransfer.layout import KVLayout
from kvtransfer.link import Link
from kvtransfer.link_handshake import LinkIdentity, dial
from kvtransfer.listener import LinkListener
from kvtransfer.messages import Ack, Hello, Message, Renew, decode
from kvtransfer.settings import FabricSettings
from kvtransfer.tasks import TaskSet
from tests.unit.kvtransfer.fabric_pair import LAYOUT, QUICK, SECRET, until


def identity(
    worker: str, secret: bytes = SECRET, layout: KVLayout = LAYOUT, scheme: str = "tcp", slab_bytes: int = 4096
) -> LinkIdentity:
    return LinkIdentity(worker, secret, layout, scheme, max(slab_bytes, layout.block_bytes), 1 << 20, b"where my memory is")


@dataclass
class Server:
    listener: LinkListener
    address: str
    counts: Counter[str] = field(default_factory=Counter)
    messages: list[Message] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    fatal: list[BaseException] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@asynccontextmanager
async def server(own: LinkIdentity | None = None, settings: FabricSettings = QUICK) -> AsyncIterator[Server]:
    result = Server(None, "")  # type: ignore[arg-type]
    tasks = TaskSet(result.fatal.append)

    def count(name: str, amount: float) -> None:
        result.counts[name] += int(amount)

    result.listener = LinkListener(
        own or identity("p0@1"),
        settings,
        SystemClock(),
        tasks,
        count,
        on_message=lambda link, message: result.messages.append(message),
        on_lost=lambda link, reason: result.lost.append(reason),
    )
    result.address = await result.listener.start("127.0.0.1", 0)
    try:
        yield result
    finally:
        await result.listener.close("test over")
        assert await tasks.cancel(2.0)
    assert not result.fatal, result.fatal


async def connect(
    to: Server, own: LinkIdentity | None = None, settings: FabricSettings = QUICK, address: str | None = None
) -> Link:
    return await dial(address or to.address, "p0@1", own or identity("d0@1"), settings, SystemClock())


@asynccontextmanager
async def running(link: Link) -> AsyncIterator[asyncio.Task[str]]:
    task = asyncio.create_task(link.run(lambda link, message: None))
    try:
        yield task
    finally:
        link.abort("test over")
        await task


@asynccontextmanager
async def proxy(port: int, change: Callable[[bytes], bytes | None]) -> AsyncIterator[str]:
    """Forwards both ways; what the dialler sends goes through `change` (None swallows it and everything after)."""
    tasks: set[asyncio.Task[None]] = set()

    async def forward(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, through: Callable[[bytes], bytes | None]
    ) -> None:
        try:
            while data := await reader.read(65536):
                changed = through(data)
                if changed is not None:
                    writer.write(changed)
                    await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(forward(reader, up_writer, change), forward(up_reader, writer, lambda data: data))

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(serve(reader, writer))
        tasks.add(task)

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_messages_cross_in_order_and_descriptions_are_exchanged() -> None:
    async with server() as to:
        link = await connect(to)
        async with running(link):
            assert bytes.fromhex(link.welcome.description) == b"where my memory is"
            await until(lambda: "d0@1" in to.listener.links)
            assert to.listener.links["d0@1"].frame_key == link.frame_key
            sent = [Ack("h", 1, n) for n in range(50)]
            assert all(link.send(message) for message in sent)
            await until(lambda: len(to.messages) == 50)
            assert to.messages == sent
        await until(lambda: bool(to.lost))


async def test_wrong_secret_is_refused_with_the_reason_on_both_sides() -> None:
    async with server() as to:
        with pytest.raises(HandoffFailed, match="does not know the cluster secret"):
            await connect(to, identity("d0@1", secret=b"another secret, quite as long"))
        await until(lambda: to.counts["links_refused"] == 1)
        assert to.listener.last_refusal == "d0@1 does not know the cluster secret" and not to.listener.links


async def test_an_impostor_that_listens_is_not_believed() -> None:
    """It copies the right answer's form, but cannot prove the secret; the dialler sends it no layout and no description."""
    seen = bytearray()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in (
            b'{"type":"challenge","version":1,"worker":"p0@1","nonce":"%s"}' % (b"00" * 32),
            b'{"type":"proof","proof":"%s"}' % (b"00" * 32),
        ):  # noqa: E501
            (length,) = struct.unpack(">I", await reader.readexactly(4))
            seen.extend(await reader.readexactly(length))
            writer.write(struct.pack(">I", len(answer)) + answer)
        seen.extend(await reader.read())
        writer.transport.abort()
        over.set()

    over = asyncio.Event()
    listening = await asyncio.start_server(impostor, "127.0.0.1", 0)
    address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    with pytest.raises(HandoffFailed, match="does not know the cluster secret"):
        await dial(address, "p0@1", identity("d0@1"), QUICK, SystemClock())
    await asyncio.wait_for(over.wait(), 1.0)
    listening.close()
    assert b"layout" not in seen and b"description" not in seen


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(LAYOUT, block_size=8), "block_size 4 here, 8 there"),
        (replace(LAYOUT, dtype="bfloat16"), "dtype float32 here, bfloat16 there"),
        (replace(LAYOUT, model_digest="another"), "model_digest"),
        (replace(LAYOUT, version=2), "version 1 here, 2 there"),
    ],
)
async def test_another_layout_is_refused_with_the_reason_on_both_sides(other: KVLayout, words: str) -> None:
    async with server() as to:
        with pytest.raises(LayoutMismatch, match=words):
            await connect(to, identity("d0@1", layout=other))
        await until(lambda: to.counts["links_refused"] == 1)
        assert words in (to.listener.last_refusal or "") and not to.listener.links


async def test_another_data_plane_is_refused() -> None:
    async with server() as to:
        with pytest.raises(LayoutMismatch, match="data plane tcp here, ucx there"):
            await connect(to, identity("d0@1", scheme="ucx"))


async def test_another_protocol_version_is_refused_with_the_reason_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server() as to:
        encode = link_handshake.encode

        def newer(message: Message) -> bytes:
            return encode(replace(message, version=2) if isinstance(message, Hello) else message)

        monkeypatch.setattr(link_handshake, "encode", newer)
        with pytest.raises(LayoutMismatch, match="protocol version 1 here, 2 there"):
            await connect(to)
        await until(lambda: to.counts["links_refused"] == 1)
        assert to.listener.last_refusal == "protocol version 1 here, 2 there"


async def test_a_tampered_message_ends_the_link_and_is_not_delivered() -> None:
    def change(data: bytes) -> bytes:
        return data.replace(b'"frame_index":7', b'"frame_index":8')

    async with server() as to, proxy(to.port, change) as address:
        link = await connect(to, address=address)
        async with running(link) as run:
            link.send(Ack("h", 1, 7))
            await until(lambda: bool(to.lost))
            assert "MAC" in to.lost[0] and to.messages == []
            await asyncio.wait_for(run, 1.0)


async def test_a_replayed_message_ends_the_link() -> None:
    def change(data: bytes) -> bytes:
        return data + data if b'"frame_index":7' in data else data

    async with server() as to, proxy(to.port, change) as address:
        link = await connect(to, address=address)
        async with running(link):
            link.send(Ack("h", 1, 7))
            await until(lambda: bool(to.lost))
            assert "MAC" in to.lost[0] and to.messages == [Ack("h", 1, 7)]


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack(">I", 0xFFFFFFFF) + b"x" * 100,
        struct.pack(">I", 5000) + b"x" * 5000,
        struct.pack(">I", 0),
        struct.pack(">I", 20) + b"\xff" * 20,
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 4000) + b"[" * 4000,
        pickle.dumps({"handoff": print}),
        struct.pack(">I", 100) + pickle.dumps(SystemClock) + b"\0" * 100,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"",
    ],
)
async def test_garbage_on_the_port_is_refused_and_disturbs_nobody(garbage: bytes) -> None:
    async with server() as to:
        link = await connect(to)
        async with running(link):
            await until(lambda: "d0@1" in to.listener.links)
            reader, writer = await asyncio.open_connection("127.0.0.1", to.port)
            writer.write(garbage)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 2.0)
            writer.close()
            await until(lambda: to.counts["links_refused"] == 1)
            assert b"layout" not in answer and len(answer) < 1000
            link.send(Ack("h", 1, 1))
            await until(lambda: to.messages == [Ack("h", 1, 1)])


async def test_a_message_over_the_bound_ends_an_authenticated_link() -> None:
    settings = replace(QUICK, message_bytes_max=5000)
    async with server(settings=settings) as to:
        link = await connect(to)
        async with running(link):
            link.send(Renew(tuple((f"h{n:090d}", n) for n in range(200))))
            await until(lambda: bool(to.lost))
            assert "at most 5000" in to.lost[0] and to.messages == []


async def test_strangers_that_say_nothing_lose_their_place() -> None:
    settings = replace(QUICK, handshake_s=0.2, handshakes_max=2)
    async with server(settings=settings) as to:
        silent = [await asyncio.open_connection("127.0.0.1", to.port) for _ in range(3)]
        await until(lambda: to.counts["links_refused"] == 1, what="the third finds no place at once")
        await until(lambda: to.counts["links_refused"] == 3, what="the others lose theirs")
        assert "no handshake within 0.2 s" in (to.listener.last_refusal or "")
        for _, writer in silent:
            writer.transport.abort()
        async with running(await connect(to)):
            await until(lambda: len(to.listener.links) == 1)


async def test_links_are_bounded_in_number() -> None:
    async with server(settings=replace(QUICK, links_max=1)) as to, running(await connect(to)):
        await until(lambda: len(to.listener.links) == 1)
        second = await connect(to, identity("d1@1"))
        async with running(second) as run:
            assert "no place for another link" in await asyncio.wait_for(run, 1.0)


async def test_a_newer_link_of_the_same_worker_replaces_the_older() -> None:
    async with server() as to:
        first = await connect(to)
        async with running(first) as run:
            await until(lambda: len(to.listener.links) == 1)
            async with running(await connect(to)):
                await asyncio.wait_for(run, 1.0)
                await until(lambda: to.lost == ["replaced by a newer link of the same worker"])
                assert len(to.listener.links) == 1


async def test_a_half_open_peer_is_dead_after_the_suspect_time_of_the_default_settings() -> None:
    """The proxy swallows everything from one moment on, as a cut cable does; no reset ever comes."""
    settings = FabricSettings()
    cut = False

    def change(data: bytes) -> bytes | None:
        return None if cut else data

    loop = asyncio.get_running_loop()
    async with server(settings=settings) as to, proxy(to.port, change) as address:
        link = await connect(to, settings=settings, address=address)
        async with running(link):
            await until(lambda: "d0@1" in to.listener.links)
            await asyncio.sleep(settings.heartbeat_s * 1.2)  # At least one heartbeat has crossed.
            assert link.is_open and not to.lost
            cut, cut_s = True, loop.time()
            await until(lambda: bool(to.lost), timeout_s=5.0)
            took_s = loop.time() - cut_s
            assert "nothing heard of the peer" in to.lost[0]
            assert settings.suspect_s - settings.heartbeat_s - 0.1 < took_s < settings.suspect_s + 0.2, took_s


async def test_quiet_links_stay_open_on_heartbeats_alone() -> None:
    async with server() as to:
        link = await connect(to)
        async with running(link):
            await asyncio.sleep(4 * QUICK.suspect_s)  # The claim is about real time without messages.
            assert link.is_open and not to.lost


async def test_a_stall_of_our_own_loop_is_not_the_peers_silence() -> None:
    import time

    async with server() as to:
        link = await connect(to)
        async with running(link):
            await until(lambda: "d0@1" in to.listener.links)
            time.sleep(2 * QUICK.suspect_s)  # noqa: ASYNC251 - blocking both ends is the point
            await asyncio.sleep(3 * QUICK.heartbeat_s)
            assert link.is_open and not to.lost


async def test_a_peer_that_does_not_read_ends_the_link_instead_of_growing_a_buffer() -> None:
    settings = replace(QUICK, write_buffer_bytes_max=64 * 1024, suspect_s=1.5)
    async with server(settings=settings) as to:
        link = await connect(to, settings=settings)
        task = asyncio.create_task(link.run(lambda link, message: None))
        await until(lambda: "d0@1" in to.listener.links)
        big = Renew(tuple((f"h{n:090d}", n) for n in range(256)))
        num_sent = 0
        while link.send(big):  # The loop never yields, so nobody reads.
            num_sent += 1
            assert num_sent < 2000
        assert "does not read" in await task


async def test_an_unreachable_address_fails_at_once_with_the_address() -> None:
    async with server() as to:
        address = to.address
    with pytest.raises(HandoffFailed, match=address):
        await dial(address, "p0@1", identity("d0@1"), QUICK, SystemClock())
    with pytest.raises(HandoffFailed, match="no host:port"):
        await dial("nowhere", "p0@1", identity("d0@1"), QUICK, SystemClock())


async def test_cancelling_a_dial_leaves_no_connection() -> None:
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        gone.set()
        writer.close()

    listening = await asyncio.start_server(silent, "127.0.0.1", 0)
    address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    dialling = asyncio.create_task(dial(address, "p0@1", identity("d0@1"), QUICK, SystemClock()))
    await asyncio.sleep(0.05)
    dialling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dialling
    await asyncio.wait_for(gone.wait(), 1.0)
    listening.close()


def test_the_secret_has_a_smallest_length_and_a_slab_holds_a_block() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        identity("d0@1", secret=b"short")
    with pytest.raises(ValueError, match="cannot hold a block"):
        LinkIdentity("d0@1", SECRET, LAYOUT, "tcp", LAYOUT.block_bytes - 1, 1 << 20)


def test_decode_is_what_the_wire_goes_through() -> None:
    assert decode(b'{"type":"ack","handoff_id":"h","epoch":1,"frame_index":0}') == Ack("h", 1, 0)
