"""One process's life: starting, ready, draining, stopped; signals in, an exit code out.

The first SIGTERM or SIGINT asks for a drain, a second one for an immediate stop; `fail` (a broken invariant, an engine that died) stops at
once with a non-zero code. It only records and wakes: what draining means is the service's business.
"""

from __future__ import annotations

import asyncio
import signal

from common import log
from common.types import WorkerState

LOG = log.get_logger("lifecycle")
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_GRACE_OVER = 3
"""The drain's grace limit was reached and what still ran was aborted."""


class Lifecycle:
    """All methods run on the event loop; `fail_threadsafe` alone may be called from other threads."""

    def __init__(self) -> None:
        self.state = WorkerState.STARTING
        self.exit_code = EXIT_OK
        self._loop = asyncio.get_running_loop()
        self._drain_asked = asyncio.Event()
        self._stop_asked = asyncio.Event()
        self._num_signals = 0

    def install_signal_handlers(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number.name)

    def remove_signal_handlers(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def _on_signal(self, name: str) -> None:
        # Counted by themselves: an orchestrator asks for a drain first and sends its one SIGTERM after that.
        self._num_signals += 1
        if self._num_signals > 1:
            LOG.warn("stop_asked", signal=name)
            self._stop_asked.set()
        else:
            LOG.event("drain_asked", signal=name)
            self.ask_drain()

    def ready(self) -> None:
        if self.state is WorkerState.STARTING:
            self.state = WorkerState.READY

    def ask_drain(self) -> None:
        self._drain_asked.set()

    def fail(self, event: str, /, **fields: object) -> None:
        """Something is broken beyond repair in this process: say it, stop at once, exit non-zero."""
        LOG.error(event, **fields)
        self.exit_code = EXIT_FAILED
        self._drain_asked.set()
        self._stop_asked.set()

    def fail_threadsafe(self, event: str, /, **fields: object) -> None:
        """`fail` from any thread. The exit code is set at once: the loop may be at its end and never run what it is handed."""
        self.exit_code = EXIT_FAILED
        try:
            self._loop.call_soon_threadsafe(lambda: self.fail(event, **fields))
        except RuntimeError:  # the loop is closed
            LOG.error(event, **fields)

    async def drain_asked(self) -> None:
        """Returns when the process should stop taking work (or stop at once: see `is_stopping`)."""
        await self._drain_asked.wait()
        if self.state is not WorkerState.STOPPED:
            self.state = WorkerState.DRAINING

    @property
    def is_stopping(self) -> bool:
        """No more waiting: end now."""
        return self._stop_asked.is_set()

    async def wait_drained(self, drained: asyncio.Event, grace_s: float) -> bool:
        """Until the work is done, the grace is over, or an immediate stop is asked for. True if the work is done."""
        waits = [asyncio.create_task(drained.wait()), asyncio.create_task(self._stop_asked.wait())]
        try:
            await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if not drained.is_set() and self.exit_code == EXIT_OK:
            self.exit_code = EXIT_GRACE_OVER
        return drained.is_set()
