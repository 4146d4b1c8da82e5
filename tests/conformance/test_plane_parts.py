"""Parts of the data planes that the shared suite cannot reach: who may talk to the tcp listener, the order in which the
read thread lets go of a hung source, the prediction of UCX's read path, and how a worker process ends."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading

import pytest

from common.errors import HandoffFailed
from kvtransfer.planes import tcp, tcp_server
from kvtransfer.planes.read_path import ProcessPlace, ReadPath, predict_read_path, transport_allowed
from kvtransfer.planes.read_thread import ReadError, ReadThread
from kvtransfer.planes.tcp_handshake import prove_as_client
from tests.fakes.plane_peer import SECRET
from tests.harness import ROOT

# --- tcp listener ---------------------------------------------------------------------------------------------------


async def open_socket(plane: tcp.TcpPlane) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", plane._port))
    return sock


async def read_to_end(sock: socket.socket) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    async with asyncio.timeout(5):
        try:
            while piece := await loop.sock_recv(sock, 65536):
                data += piece
        except ConnectionResetError:
            pass
    sock.close()
    return data


@pytest.fixture
def region() -> bytearray:
    return bytearray(b"secret KV bytes " * 256)


@pytest.mark.parametrize("opening", [b"", b"GET / HTTP/1.1\r\n\r\n" * 4, b"BTN\x01" + b"\0" * 16 + b"\0" * 32, os.urandom(200)])
async def test_connection_without_the_proof_gets_no_byte_of_the_region(
    opening: bytes, region: bytearray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "HANDSHAKE_TIMEOUT_S", 0.3)
    plane = tcp.TcpPlane("p@1", SECRET)
    await plane.start(memoryview(region))
    sock = await open_socket(plane)
    await asyncio.get_running_loop().sock_sendall(sock, opening + tcp_server.REQUEST.pack(1, 0, 64))
    answer = await read_to_end(sock)
    assert len(answer) <= 16 + 32  # a nonce and a proof of the listener at most
    assert b"secret" not in answer
    await plane.close()


@pytest.mark.parametrize(("offset", "num_bytes"), [(4096, 1), (0, 4097), (4095, 2), (2**64 - 1, 2), (0, 0), (1, 2**64 - 1)])
async def test_request_outside_of_the_region_ends_the_connection_without_a_byte(
    offset: int, num_bytes: int, region: bytearray
) -> None:
    plane = tcp.TcpPlane("p@1", SECRET)
    await plane.start(memoryview(region))
    sock = await open_socket(plane)
    await prove_as_client(sock, plane._key, plane._listener_id)
    await asyncio.get_running_loop().sock_sendall(sock, tcp_server.REQUEST.pack(1, offset, num_bytes))
    assert await read_to_end(sock) == b""
    assert plane._server is not None and plane._server.counts == {"range_error": 1}
    await plane.close()


async def test_reader_refuses_a_listener_that_cannot_prove_itself(region: bytearray) -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(20)
        writer.write(os.urandom(48))
        await reader.read()
        writer.close()

    plane, other = tcp.TcpPlane("d@1", SECRET), tcp.TcpPlane("p@1", SECRET)
    await plane.start(memoryview(region))
    await other.start(memoryview(region))
    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    other._port = server.sockets[0].getsockname()[1]  # as if the worker had died and its port had been taken over
    with pytest.raises(HandoffFailed, match="not the listener that was described"):
        await plane.connect("p@1", other.describe())
    server.close()
    await server.wait_closed()
    await plane.close()
    await other.close()


async def test_number_of_connections_is_bounded_and_a_freed_place_is_used(
    region: bytearray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "CONNECTIONS_MAX", 2)
    source = tcp.TcpPlane("p@1", SECRET)
    readers = [tcp.TcpPlane(f"d@{n}", SECRET) for n in range(3)]
    for plane in (source, *readers):
        await plane.start(memoryview(bytearray(region)))
    await readers[0].connect("p@1", source.describe())
    await readers[1].connect("p@1", source.describe())
    with pytest.raises(HandoffFailed):
        await readers[2].connect("p@1", source.describe())
    assert await readers[1].fetch("p@1", 0, 0, 4096).done >= 0
    await readers[0].disconnect("p@1")
    assert source._server is not None
    async with asyncio.timeout(5):
        await asyncio.wait(source._server._serving, return_when=asyncio.FIRST_COMPLETED)
    await readers[2].connect("p@1", source.describe())
    assert await readers[2].fetch("p@1", 0, 0, 4096).done >= 0
    for plane in (source, *readers):
        await plane.close()


# --- read thread ----------------------------------------------------------------------------------------------------


class FakeReader:
    """Reads end when the test says so; every call is recorded."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ending: dict[int, str | None] = {}
        self.handles = 0

    def load(self, metadata: bytes) -> str:
        self.calls.append(f"load {metadata.decode()}")
        return metadata.decode()

    def begin(self, source: str, remote_address: int, local_address: int, num_bytes: int) -> int | None:
        self.calls.append(f"begin {source}")
        self.handles += 1
        return self.handles

    def is_complete(self, handle: int) -> bool:
        if handle not in self.ending:
            return False
        if (reason := self.ending[handle]) is not None:
            raise ReadError(reason)
        return True

    def release(self, handle: int) -> None:
        self.calls.append(f"release {handle}")

    def forget(self, source: str) -> None:
        self.calls.append(f"forget {source}")

    def close(self) -> None:
        self.calls.append("close")


class Ends:
    """Collects the ends of reads in the order in which they came."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None]] = []
        self._changed = threading.Condition()

    def of(self, name: str):  # noqa: ANN201
        def on_end(reason: str | None) -> None:
            with self._changed:
                self.seen.append((name, reason))
                self._changed.notify_all()

        return on_end

    def wait(self, num: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= num, timeout=5), self.seen


def barrier(thread: ReadThread) -> None:
    thread.call(lambda reader: None).result(5)


def test_hung_source_is_forgotten_only_after_its_last_read_has_ended() -> None:
    reader, ends = FakeReader(), Ends()
    thread = ReadThread("plane under test", lambda: reader)
    assert thread.load("p", b"p").result(5) == "p"
    for name in ("first", "second"):
        thread.read("p", 0, 0, 1, wanted=lambda: True, on_end=ends.of(name))
    thread.forget("p")
    thread.read("p", 0, 0, 1, wanted=lambda: True, on_end=ends.of("late"))
    ends.wait(1)
    assert ends.seen[0][0] == "late" and ends.seen[0][1] is not None
    with pytest.raises(ReadError, match="have not ended"):
        thread.load("p", b"p").result(5)
    reader.ending[1] = None
    ends.wait(2)
    barrier(thread)
    assert "forget p" not in reader.calls
    reader.ending[2] = "remote disconnected"
    ends.wait(3)
    barrier(thread)
    assert ends.seen[1:] == [("first", None), ("second", "remote disconnected")]
    assert reader.calls == ["load p", "begin p", "begin p", "release 1", "release 2", "forget p"]
    assert thread.load("p", b"p").result(5) == "p"
    thread.stop()
    assert thread.join(5)


def test_read_that_is_not_wanted_any_more_is_never_begun() -> None:
    reader, ends = FakeReader(), Ends()
    thread = ReadThread("plane under test", lambda: reader)
    thread.read("p", 0, 0, 1, wanted=lambda: False, on_end=ends.of("unwanted"))
    ends.wait(1)
    assert ends.seen[0][1] is not None and "begin p" not in reader.calls
    thread.stop()
    assert thread.join(5)


def test_stop_with_a_stuck_read_destroys_the_agent_before_the_read_counts_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.planes.read_thread.STOP_GRACE_S", 0.05)
    reader, ends = FakeReader(), Ends()
    thread = ReadThread("plane under test", lambda: reader)
    thread.read("p", 0, 0, 1, wanted=lambda: True, on_end=lambda reason: ends.of(f"stuck after {reader.calls[-1]}")(reason))
    barrier(thread)
    thread.stop()
    thread.finished.result(5)
    assert ends.seen == [("stuck after close", "the data plane was closed")]
    assert thread.join(5)


def test_bug_on_the_read_thread_is_reported_and_settles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    reader, ends = FakeReader(), Ends()
    thread = ReadThread("plane under test", lambda: reader)
    thread.read("p", 0, 0, 1, wanted=lambda: True, on_end=ends.of("running"))
    barrier(thread)
    reader.is_complete = lambda handle: 1 // 0  # type: ignore[method-assign,assignment]
    with pytest.raises(ZeroDivisionError):
        thread.finished.result(5)
    assert thread.join(5) and ends.seen == []


# --- read path and exit ---------------------------------------------------------------------------------------------


def test_read_path_says_why_the_memory_of_a_peer_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr("kvtransfer.planes.read_path.Path.is_dir", lambda path: False)
    own = ProcessPlace.own()
    memory = bytearray(8)
    address = id(memory)  # any address that is mapped
    assert predict_read_path(own, address) == (ReadPath.CMA, "")
    for place, reason in (
        (ProcessPlace(b"\0" * 16, own.pid_namespace, own.pid), "another host"),
        (ProcessPlace(own.boot_id, own.pid_namespace + 1, own.pid), "another pid namespace"),
    ):
        path, why = predict_read_path(place, address)
        assert path is ReadPath.EMULATED and reason in why
    path, why = predict_read_path(own, 8)
    assert path is ReadPath.EMULATED and "not permitted" in why
    monkeypatch.setenv("UCX_TLS", "tcp")
    path, why = predict_read_path(own, address)
    assert path is ReadPath.EMULATED and "UCX_TLS=tcp" in why


@pytest.mark.parametrize(
    ("value", "allowed"),
    [("all", True), ("tcp", False), ("tcp,cma", True), ("^cma,sm,shm", False), ("^ib", True), ("sm,tcp", True)],
)
def test_ucx_tls_is_read_as_ucx_reads_it(value: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", value)
    assert transport_allowed({"all", "cma", "sm", "shm"}) is allowed


TEARDOWN = """
import atexit, logging, sys, threading
from kvtransfer.planes.process_exit import exit_process

class Loud:
    def __del__(self, write=sys.__stdout__.write):
        write("destructor ran")

held = Loud()
atexit.register(print, "atexit handler ran")
threading.Thread(target=threading.Event().wait).start()  # not a daemon: an interpreter's own exit would join it for ever
sys.stdout = open(1, "w", buffering=1 << 16, closefd=False)
logging.basicConfig(stream=open(2, "w", buffering=1 << 16, closefd=False), format="%(message)s")
logging.getLogger("x").error("last log line")
print("last words", end="")
"""


def test_a_worker_leaves_without_teardown_and_with_all_it_has_said() -> None:
    """Destroying torch and what came with it takes a core for a second, and destructors of RDMA libraries crash."""
    ended = subprocess.run(
        [sys.executable, "-c", TEARDOWN + "exit_process(3)"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.returncode, ended.stdout) == (3, "last words")
    assert ended.stderr == "last log line\n"


def test_the_exit_code_survives_a_reader_of_the_log_that_is_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-c", TEARDOWN + "exit_process(3)"], cwd=ROOT, stdout=writing, stderr=writing, timeout=30, check=False
    )
    os.close(writing)
    assert ended.returncode == 3
