"""The data plane over UCX, through the pinned NIXL binding: cross-memory copies on one host, RDMA between hosts.

The binding's agent lives on the plane's own ReadThread. UCX's progress thread waits for events with a timeout of
PROGRESS_TIMEOUT_US instead of spinning, so an idle plane costs nothing and a target still answers at once. A hung peer is
never reported here: a fetch from it stays in flight, `disconnect` fails its `done`, and `settled` waits for the truth.

At process exit, RDMA provider libraries of the system can crash in their destructors: leave by `process_exit.exit_process`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import os
import secrets
import struct
from concurrent.futures import Future
from typing import Any

import numpy as np

from common import log
from common.errors import HandoffFailed
from kvtransfer.data_plane import Fetch
from kvtransfer.planes.description import open_description, seal_description
from kvtransfer.planes.fetches import FetchBook, RunningFetch
from kvtransfer.planes.read_path import ProcessPlace, ReadPath, predict_read_path
from kvtransfer.planes.read_thread import Reader, ReadError, ReadThread

BINDINGS = ("nixl_cu13", "nixl_cu12")
"""The same code for two CUDA major versions; neither needs CUDA to be present."""
BINDING_VERSION = "1.5.1"
PROGRESS_TIMEOUT_US = 100_000
"""Not a poll interval: events wake the progress thread at once. The binding's own default of 0 burns a whole core."""
CONNECT_TIMEOUT_S = 3.0
CLOSE_TIMEOUT_S = 5.0

_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "WARN",
    "UCX_LOG_FILE": "stderr",  # else UCX writes to stdout
    "UCX_LOG_LEVEL": "error",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
_FIELDS = struct.Struct("!QQ16sQIHI")
"""region address, region bytes, boot id, pid namespace, pid, bytes of the agent name, bytes of the metadata"""
_SCRATCH_BYTES = 4096

LOG = log.get_logger("kvtransfer.ucx")


def ucx_unavailable() -> str | None:
    """None when the binding is installed in the version this code was written for, else the reason."""
    for module in BINDINGS:
        if importlib.util.find_spec(module) is not None:
            version = importlib.metadata.version(module.replace("_", "-"))
            return None if version == BINDING_VERSION else f"{module} {version} is installed, {BINDING_VERSION} is needed"
    return f"the UCX binding is not installed (pip install nixl-cu13=={BINDING_VERSION})"


class _NixlReader:
    """One NIXL agent with one registered region. Every method runs on the read thread."""

    def __init__(self, agent_name: str, region: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        if (reason := ucx_unavailable()) is not None:
            raise ReadError(reason)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        found = next(module for module in BINDINGS if importlib.util.find_spec(module) is not None)
        # The binding itself, not the package's wrapper: that fixes the progress timeout to 0 and pickles descriptors.
        self._nixl = importlib.import_module(f"{found}._bindings")
        named = [value for name, value in vars(self._nixl).items() if name.endswith("Error")]
        self._errors: tuple[type[Exception], ...] = tuple(value for value in named if isinstance(value, type))
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_TIMEOUT_US
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        config.captureTelemetry = False
        self._scratch = np.zeros(_SCRATCH_BYTES, np.uint8)
        self.scratch_address: int = self._scratch.ctypes.data
        try:
            self._agent = self._nixl.nixlAgent(agent_name, config)
            self._backend = self._agent.createBackend("UCX", {})
            rows = [(array.ctypes.data, array.nbytes, 0, b"") for array in (region, self._scratch)]
            self._registered = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, rows)
            self._agent.registerMem(self._registered, [self._backend])
            self.metadata: bytes = self._agent.getLocalMD()
        except self._errors + (RuntimeError,) as error:
            hint = "; UCX_TLS must contain tcp or an RDMA transport" if "UCX_TLS" in os.environ else ""
            raise ReadError(f"UCX cannot start: {error}{hint}") from error

    def load(self, metadata: bytes) -> str:
        try:
            name: bytes = self._agent.loadRemoteMD(metadata)
            self._agent.makeConnection(name.decode(), [self._backend])
        except self._errors as error:
            raise ReadError(f"the metadata was not accepted: {error}") from error
        return name.decode()

    def begin(self, source: str, remote_address: int, local_address: int, num_bytes: int) -> int | None:
        nixl = self._nixl
        local = nixl.nixlXferDList(nixl.DRAM_SEG, np.array([[local_address, num_bytes, 0]], np.uint64))
        remote = nixl.nixlXferDList(nixl.DRAM_SEG, np.array([[remote_address, num_bytes, 0]], np.uint64))
        try:
            handle: int = self._agent.createXferReq(nixl.NIXL_READ, local, remote, source, "", [self._backend])
        except self._errors as error:
            raise ReadError(f"the read was not accepted: {error}") from error
        try:
            state = self._agent.postXferReq(handle, "")
        except self._errors as error:
            self.release(handle)
            raise ReadError(str(error)) from error
        if state == nixl.NIXL_IN_PROG:
            return handle
        self.release(handle)
        return None

    def is_complete(self, handle: int) -> bool:
        try:
            return bool(self._agent.getXferStatus(handle) == self._nixl.NIXL_SUCCESS)
        except self._errors as error:
            raise ReadError(str(error)) from error

    def release(self, handle: int) -> None:
        try:
            self._agent.releaseXferReq(handle)
        except self._errors as error:
            LOG.warn("ucx_read_release_failed", error=str(error))

    def forget(self, source: str) -> None:
        try:
            self._agent.invalidateRemoteMD(source)
        except self._nixl.nixlNotFoundError:
            pass  # its metadata was never accepted, or its connection broke and the agent dropped it

    def close(self) -> None:
        try:
            self._agent.deregisterMem(self._registered, [self._backend])
        except self._errors as error:
            LOG.warn("ucx_deregister_failed", error=str(error))
        # The last reference: the destructor ends the progress thread, closes all connections and frees the workers.
        del self._agent


class UcxPlane:
    """A DataPlane over NIXL. `path(peer)` tells by which way its bytes come."""

    scheme = "ucx"

    def __init__(self, name: str, secret: bytes) -> None:
        self._name = name
        self._secret = secret
        # An agent name must never be seen twice by a peer, not even when one worker opens a second plane.
        self._agent_name = f"{name}#{secrets.token_hex(4)}"
        self._book = FetchBook(0)
        self._region: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._thread: ReadThread | None = None
        self._scratch_address = 0
        self._description = b""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._peers: dict[str, tuple[str, int, int, ReadPath]] = {}

    async def start(self, region: memoryview) -> None:
        if self._thread is not None:
            raise HandoffFailed(f"data plane of {self._name} is already started")
        self._loop = asyncio.get_running_loop()
        self._book = FetchBook(region.nbytes)
        array = np.frombuffer(region, np.uint8)
        reader: _NixlReader | None = None

        def open_reader() -> Reader:
            nonlocal reader
            reader = _NixlReader(self._agent_name, array)
            return reader

        thread = ReadThread(f"ucx plane {self._name}", open_reader)
        try:
            await asyncio.wrap_future(thread.started)
        except ReadError as error:
            thread.join(CLOSE_TIMEOUT_S)
            raise HandoffFailed(f"data plane of {self._name}: {error}") from error
        assert reader is not None
        thread.finished.add_done_callback(self._thread_ended)
        self._thread, self._region, self._scratch_address = thread, array, reader.scratch_address
        place, agent = ProcessPlace.own(), self._agent_name.encode()
        fields = _FIELDS.pack(
            array.ctypes.data, array.nbytes, place.boot_id, place.pid_namespace, place.pid, len(agent), len(reader.metadata)
        )
        self._description = seal_description(self.scheme, self._secret, fields + agent + reader.metadata)

    def describe(self) -> bytes:
        self._running()
        return self._description

    async def connect(self, peer: str, description: bytes) -> None:
        payload = open_description(self.scheme, self._secret, description)
        if len(payload) < _FIELDS.size:
            raise HandoffFailed(f"description of {peer} has only {len(payload)} bytes of fields")
        address, region_bytes, boot_id, pid_namespace, pid, name_bytes, metadata_bytes = _FIELDS.unpack_from(payload)
        agent = payload[_FIELDS.size : _FIELDS.size + name_bytes].decode()
        metadata = payload[_FIELDS.size + name_bytes :]
        if len(metadata) != metadata_bytes:
            raise HandoffFailed(f"description of {peer} has {len(metadata)} bytes of metadata instead of {metadata_bytes}")
        thread = self._running()
        if peer in self._peers:
            raise HandoffFailed(f"peer {peer} is already connected")
        if agent in {self._agent_name, *(known for known, *_ in self._peers.values())}:
            raise HandoffFailed(f"the plane that describes itself as {peer} is this one, or is connected under another name")
        path, why = predict_read_path(ProcessPlace(boot_id, pid_namespace, pid), address)
        if path is ReadPath.EMULATED:
            if "UCX_TLS" not in os.environ:
                raise HandoffFailed(f"no safe UCX path to {peer}: {why}; use the tcp data plane")
            LOG.warn("ucx_reads_emulated_over_tcp", peer=peer, reason=why)
        self._peers[peer] = (agent, address, region_bytes, path)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.wrap_future(thread.load(agent, metadata))
                await self._try_one_byte(thread, agent, address)
        except BaseException as error:
            self._forget(peer, agent)
            if isinstance(error, TimeoutError):
                raise HandoffFailed(f"peer {peer} did not answer within {CONNECT_TIMEOUT_S} s") from error
            if isinstance(error, ReadError):
                raise HandoffFailed(f"cannot connect to {peer}: {error}") from error
            raise
        if self._peers.get(peer, ("",))[0] != agent:
            raise HandoffFailed(f"peer {peer} was disconnected while it was being connected")

    def path(self, peer: str) -> str:
        return self._peers[peer][3].value

    def fetch(self, peer: str, remote_offset: int, local_offset: int, num_bytes: int) -> Fetch:
        thread = self._running()
        if peer not in self._peers:
            raise HandoffFailed(f"peer {peer} is not connected")
        agent, address, region_bytes, _ = self._peers[peer]
        fetch = self._book.open(peer, region_bytes, remote_offset, local_offset, num_bytes)
        assert self._region is not None
        thread.read(
            agent,
            address + remote_offset,
            self._region.ctypes.data + local_offset,
            num_bytes,
            wanted=lambda: not fetch.outcome.done.done(),
            on_end=lambda reason: self._post(fetch, reason),
        )
        return fetch.outcome

    async def disconnect(self, peer: str) -> None:
        known = self._peers.get(peer)
        if known is not None:
            self._forget(peer, known[0])

    async def close(self) -> None:
        """Raises HandoffFailed if the library does not let go in CLOSE_TIMEOUT_S; `settled` then stays open, honestly."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._fail_all("closed")
        self._peers.clear()
        thread.stop()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.shield(asyncio.wrap_future(thread.finished))
        except TimeoutError as error:
            raise HandoffFailed(f"data plane of {self._name} did not close within {CLOSE_TIMEOUT_S} s") from error
        thread.join(CLOSE_TIMEOUT_S)
        self._region = None
        # The last reads were posted to this loop before `finished`; let them be settled before the caller goes on.
        await asyncio.sleep(0)

    def _running(self) -> ReadThread:
        if self._thread is None or self._thread.finished.done():
            raise HandoffFailed(f"data plane of {self._name} is not running")
        return self._thread

    def _forget(self, peer: str, agent: str) -> None:
        if self._peers.get(peer, ("",))[0] == agent:
            del self._peers[peer]
        for fetch in self._book.of_peer(peer):
            fetch.fail(HandoffFailed(f"fetch of {fetch.num_bytes} bytes from {peer}: disconnected"))
        if self._thread is not None:
            self._thread.forget(agent)

    def _thread_ended(self, finished: Future[None]) -> None:
        if finished.exception() is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail_all, f"its thread died: {finished.exception()!r}")

    def _fail_all(self, reason: str) -> None:
        for fetch in self._book.running:
            fetch.fail(HandoffFailed(f"fetch from {fetch.peer}: data plane of {self._name}: {reason}"))

    async def _try_one_byte(self, thread: ReadThread, agent: str, address: int) -> None:
        """The first read sets the connection up (5 to 140 ms) and proves that the region is readable. It lands in memory of
        the reader, which lives as long as the agent does, so that it may be abandoned."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str | None] = loop.create_future()

        def tell(reason: str | None) -> None:
            if not ended.done():
                ended.set_result(reason)

        def on_end(reason: str | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell, reason)

        thread.read(agent, address, self._scratch_address, 1, wanted=lambda: not ended.done(), on_end=on_end)
        if (reason := await ended) is not None:
            raise ReadError(reason)

    def _post(self, fetch: RunningFetch, reason: str | None) -> None:
        """On the read thread: hands the end of a read to the event loop, where the futures live."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end, fetch, reason)

    def _end(self, fetch: RunningFetch, reason: str | None) -> None:
        if reason is None:
            fetch.succeed()
        else:
            fetch.fail(HandoffFailed(f"fetch of {fetch.num_bytes} bytes from {fetch.peer}: {reason}"))
        fetch.settle()
