"""Runs one engine on one thread: takes commands at step borders, runs the scheduler's batches, posts events.

Owns the thread, the bounded command queue and the views that other threads may read; scheduler and runner belong to the thread
alone. It blocks without polling whenever there is nothing to compute, and any error ends it: the worker must then stop, because
the state behind a broken invariant is not to be trusted. Times are monotonic seconds of the clock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from common.clock import Clock
from common.errors import Overloaded, WorkerUnavailable
from common.types import BlockCensus, EngineCounts, WorkerLoad
from engine.batch import ModelRunner
from engine.commands import Command, Event, Generate, Prefill, Reserve, StepEvents
from engine.scheduler import Scheduler

RETRY_AFTER_S = 0.5
"""Hint for a refusal because commands queue up: a queue of this kind drains within one step."""


class EngineLoop:
    """`start`, `submit`…, `stop`. `on_events`, `on_fatal` and `on_step` (seconds of each step) are called on the engine thread
    and must not block."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        clock: Clock,
        on_events: Callable[[StepEvents], None],
        on_fatal: Callable[[BaseException], None],
        on_step: Callable[[float], None] = lambda seconds: None,
        command_queue_max: int = 4096,
        name: str = "engine",
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._on_events = on_events
        self._on_fatal = on_fatal
        self._on_step = on_step
        self._command_queue_max = command_queue_max
        self._commands: deque[Command] = deque()
        self._wakeup = threading.Condition()
        self._is_stopping = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._load = scheduler.load()
        self._census = scheduler.census()
        self._counts = scheduler.counts()
        self._busy_since_s: float | None = None
        self._last_progress_s = clock.monotonic()

    # ---- any thread ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Queues a command for the next step border; thread-safe.

        Raises Overloaded if the queue is full, WorkerUnavailable after `stop` or a fatal error. Commands that start a sequence
        may use the first half of the queue only: what frees memory is never refused because of what asks for it.
        """
        is_opening = isinstance(command, Generate | Prefill | Reserve)
        with self._wakeup:
            if self._is_stopping or self._is_closed:
                raise WorkerUnavailable("the engine has stopped and takes no commands")
            num_max = self._command_queue_max if is_opening else 2 * self._command_queue_max
            if len(self._commands) >= num_max:
                raise Overloaded(f"{len(self._commands)} commands wait for the engine", retry_after_s=RETRY_AFTER_S)
            self._commands.append(command)
            self._wakeup.notify()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread at the next step border, and with it all sequences, with reason ABORT. True if the thread has ended.

        Idempotent, and harmless on a loop that was never started. Commands that were queued and not yet taken are dropped.
        """
        with self._wakeup:
            self._is_stopping = True
            self._wakeup.notify()
        if self._thread.ident is None:
            return True
        if self._thread is threading.current_thread():
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def load(self) -> WorkerLoad:
        """As of the last step border."""
        return self._load

    def census(self) -> BlockCensus:
        """As of the last step border."""
        return self._census

    def counts(self) -> EngineCounts:
        """Since the start, as of the last step border."""
        return self._counts

    @property
    def last_progress_s(self) -> float:
        """When the engine thread last passed a step border. Stands still while idle, too: see `stalled_for_s`."""
        return self._last_progress_s

    def stalled_for_s(self, now: float) -> float:
        """How long the commands or the step in work have been taking; 0 while the thread waits for commands."""
        busy_since_s = self._busy_since_s
        return 0.0 if busy_since_s is None else max(0.0, now - busy_since_s)

    # ---- the engine thread ---------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - the top of the thread: whatever it is, the worker must hear of it
            self._close()
            self._on_fatal(error)
        else:
            self._close()

    def _run(self) -> None:
        is_idle = True
        while (taken := self._take_commands(wait=is_idle)) is not None:
            self._busy_since_s = self._clock.monotonic()
            is_idle = not self._step(taken)
            self._last_progress_s = self._clock.monotonic()
        self._post(self._scheduler.abort_all())

    def _take_commands(self, *, wait: bool) -> Sequence[Command] | None:
        """All queued commands; None to stop. An idle engine waits here: only a command can give it work again."""
        with self._wakeup:
            while wait and not self._commands and not self._is_stopping:
                self._busy_since_s = None
                self._wakeup.wait()
            if self._is_stopping:
                return None
            taken, self._commands = self._commands, deque()
            return taken

    def _step(self, taken: Sequence[Command]) -> bool:
        """One turn: commands, one batch, their events. False if there was nothing to compute.

        What the commands gave goes out before the step, so that an answer to a reservation does not wait for a long chunk.
        """
        scheduler = self._scheduler
        now = self._clock.monotonic()
        events = [event for command in taken for event in scheduler.handle(command, now)]
        batch = scheduler.schedule(now)
        if batch is None:
            scheduler.check_balance()
        if taken:
            self._publish()
            self._post(events)
        if batch is None:
            return False
        events = scheduler.apply(batch, self._runner.run(batch), self._clock.monotonic())
        self._publish()
        self._post(events)
        self._on_step(self._clock.monotonic() - now)
        return True

    def _publish(self) -> None:
        """Immutable snapshots for other threads; before the events, so that who hears of an end also sees its blocks free."""
        self._load = self._scheduler.load()
        self._census = self._scheduler.census()
        self._counts = self._scheduler.counts()

    def _post(self, events: list[Event]) -> None:
        if events:
            self._on_events(StepEvents(self._clock.monotonic(), tuple(events)))

    def _close(self) -> None:
        with self._wakeup:
            self._is_closed = True
            self._commands.clear()
            self._busy_since_s = None
