"""The one thread that owns a transport agent: every call into the library happens here, in the order it was asked for.

It sleeps on its command queue when nothing is in flight and polls with growing pauses otherwise, never spinning. A read
is over when the library says so or when the agent is destroyed, and at no other time: a source with reads in flight is
kept until they end, because a library that has forgotten a source can no longer tell when its last byte has landed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

POLL_MIN_S = 50e-6
POLL_MAX_S = 1e-3
POLL_STUCK_S = 20e-3
"""The pause between polls once every read in flight is older than STUCK_AFTER_S: most likely a hung peer."""
STUCK_AFTER_S = 1.0
STOP_GRACE_S = 0.5
"""How long `stop` lets reads end by themselves before it destroys the agent under them."""

T = TypeVar("T")


class ReadError(Exception):
    """A call into the transport library failed. A read that raised it is over."""


class Reader(Protocol):
    """A transport agent; all calls come from the read thread."""

    def load(self, metadata: bytes) -> str:
        """Makes a source known; returns its agent name."""
        ...

    def begin(self, source: str, remote_address: int, local_address: int, num_bytes: int) -> int | None:
        """Starts a read and returns its handle, or None when it is complete already. May block for the whole copy."""
        ...

    def is_complete(self, handle: int) -> bool: ...

    def release(self, handle: int) -> None:
        """Frees the handle of a read that is over."""
        ...

    def forget(self, source: str) -> None: ...

    def close(self) -> None:
        """Destroys the agent; afterwards no read touches memory."""
        ...


@dataclass(frozen=True, slots=True)
class _Read:
    source: str
    started_s: float
    on_end: Callable[[str | None], None]


class ReadThread:
    """Runs from construction to `stop`. `started` resolves to the Reader, or to why it could not be opened."""

    def __init__(self, name: str, open_reader: Callable[[], Reader]) -> None:
        self.started: Future[Reader] = Future()
        self.finished: Future[None] = Future()
        self._open_reader = open_reader
        self._commands: queue.SimpleQueue[Callable[[Reader], None]] = queue.SimpleQueue()
        self._reads: dict[int, _Read] = {}
        self._condemned: set[str] = set()
        self._stopping = threading.Event()
        self._pause_s = POLL_MIN_S
        # A daemon, so that a library call that never returns cannot keep a finished process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Reader], T]) -> Future[T]:
        """Runs a function on the thread."""
        future: Future[T] = Future()

        def command(reader: Reader) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(reader))
                except ReadError as error:
                    future.set_exception(error)

        self._commands.put(command)
        return future

    def load(self, source: str, metadata: bytes) -> Future[str]:
        """Makes a source known. Fails with ReadError while reads of its former life are still in flight."""

        def load(reader: Reader) -> str:
            if any(read.source == source for read in self._reads.values()):
                raise ReadError("earlier reads from this peer have not ended")
            self._condemned.discard(source)
            name = reader.load(metadata)
            if name != source:
                reader.forget(name)
                raise ReadError(f"the metadata names agent {name!r}, the description {source!r}")
            return name

        return self.call(load)

    def read(
        self,
        source: str,
        remote_address: int,
        local_address: int,
        num_bytes: int,
        *,
        wanted: Callable[[], bool],
        on_end: Callable[[str | None], None],
    ) -> None:
        """Queues a read. `on_end` is called once, on the thread, when no byte of it can land any more: with None when all
        bytes are there, else with the reason. A read that is not `wanted` when its turn comes is not begun."""

        def command(reader: Reader) -> None:
            if self._stopping.is_set() or source in self._condemned or not wanted():
                on_end("not begun: abandoned before its turn")
                return
            try:
                handle = reader.begin(source, remote_address, local_address, num_bytes)
            except ReadError as error:
                on_end(str(error))
                return
            if handle is None:
                on_end(None)
            else:
                self._reads[handle] = _Read(source, time.monotonic(), on_end)
                self._pause_s = POLL_MIN_S

        self._commands.put(command)

    def forget(self, source: str) -> None:
        """Drops a source as soon as none of its reads is in flight."""

        def command(reader: Reader) -> None:
            self._condemned.add(source)
            self._forget_idle(reader)

        self._commands.put(command)

    def stop(self) -> None:
        """Ends the thread: reads get STOP_GRACE_S to end, then the agent is destroyed. `finished` tells when."""
        self._stopping.set()
        self._commands.put(lambda reader: None)

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            reader = self._open_reader()
        except BaseException as error:
            self.started.set_exception(error)
            self.finished.set_result(None)
            if isinstance(error, ReadError):
                return
            raise
        self.started.set_result(reader)
        try:
            self._serve(reader)
        except BaseException as error:
            # A bug. Reads in flight are neither ended nor settled: nobody can tell what still lands in memory.
            self.finished.set_exception(error)
            raise
        self.finished.set_result(None)

    def _serve(self, reader: Reader) -> None:
        stop_at_s: float | None = None
        while True:
            self._next_command()(reader)
            self._poll(reader)
            if self._stopping.is_set() and self._commands.empty():
                stop_at_s = stop_at_s or time.monotonic() + STOP_GRACE_S
                if not self._reads or time.monotonic() >= stop_at_s:
                    break
        left, self._reads = self._reads, {}
        reader.close()
        for read in left.values():
            read.on_end("the data plane was closed")

    def _next_command(self) -> Callable[[Reader], None]:
        try:
            return self._commands.get(timeout=self._pause_s if self._reads else None)
        except queue.Empty:
            return lambda reader: None

    def _poll(self, reader: Reader) -> None:
        ended = 0
        for handle, read in list(self._reads.items()):
            reason: str | None = None
            try:
                if not reader.is_complete(handle):
                    continue
            except ReadError as error:
                reason = str(error)
            del self._reads[handle]
            reader.release(handle)
            read.on_end(reason)
            ended += 1
        if ended:
            self._pause_s = POLL_MIN_S
            self._forget_idle(reader)
        elif self._reads:
            youngest_s = max(read.started_s for read in self._reads.values())
            stuck = time.monotonic() - youngest_s > STUCK_AFTER_S
            self._pause_s = POLL_STUCK_S if stuck else min(2 * self._pause_s, POLL_MAX_S)

    def _forget_idle(self, reader: Reader) -> None:
        for source in self._condemned - {read.source for read in self._reads.values()}:
            reader.forget(source)
            self._condemned.discard(source)
