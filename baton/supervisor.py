"""Keeps the children of `baton up` running: starts them, replaces one that dies, stops all in order.

Until `start_replacing` is called a death is final and ends the start-up; afterwards a child is replaced with a growing delay,
at most a few times within a window, then given up. Delays and windows are seconds of the monotonic clock; nothing here knows
what a child is.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.children import Child, ChildSpec, describe_exit
from common.clock import Clock

LOG_CHECK_S = 30.0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a child that died is started again. After `restarts_max` deaths within `window_s` it is given up."""

    first_delay_s: float = 0.5
    factor: float = 2.0
    delay_max_s: float = 15.0
    restarts_max: int = 5
    window_s: float = 120.0

    def delay_s(self, deaths: Sequence[float], now: float) -> float | None:
        """Seconds to wait before the next start, given the times of all deaths, the last included. None: give up."""
        num_recent = sum(1 for death in deaths if now - death <= self.window_s)
        if num_recent > self.restarts_max:
            return None
        return float(min(self.delay_max_s, self.first_delay_s * self.factor ** max(0, num_recent - 1)))


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person should see. `is_final`: the child will not be started again."""

    name: str
    text: str
    is_final: bool = False


class ChildDied(Exception):
    """A child ended during start-up, or was given up later."""

    def __init__(self, name: str, text: str, log_path: Path) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name
        self.text = text
        self.log_path = log_path


class Supervisor:
    """Owns the children. Use it on one event loop, on the main thread; `stop` must be awaited in any case."""

    def __init__(
        self,
        *,
        log_folder: Path,
        clock: Clock,
        policy: RestartPolicy,
        on_notice: Callable[[Notice], None],
        essential: Callable[[str], bool],
    ) -> None:
        """`essential(name)`: without this child nothing can be served, so giving it up fails everything (`failed`)."""
        self._log_folder = log_folder
        self._clock = clock
        self._policy = policy
        self._on_notice = on_notice
        self._essential = essential
        self._children: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._is_replacing = False
        self._is_stopping = False
        self.failed: asyncio.Future[ChildDied] = asyncio.get_running_loop().create_future()

    async def start(self, spec: ChildSpec) -> None:
        """Starts one child and watches over it. Raises OSError when its program cannot be run at all."""
        if spec.name in self._keepers:
            raise ValueError(f"child {spec.name!r} is there already")
        self._children[spec.name] = await Child.start(spec, self._log_folder)
        self._keepers[spec.name] = asyncio.create_task(self._keep(spec), name=f"keep {spec.name}")

    def start_replacing(self) -> None:
        """Start-up is over: from now on a child that dies is replaced."""
        self._is_replacing = True

    def pid(self, name: str) -> int:
        return self._children[name].pid

    async def _keep(self, spec: ChildSpec) -> None:
        deaths: list[float] = []
        while True:
            child = self._children[spec.name]
            exit_text = describe_exit(await self._wait(child))
            child.kill_group()
            if self._is_stopping:
                return
            if not self._is_replacing:
                self._fail(ChildDied(spec.name, f"ended during start-up ({exit_text})", child.log_path))
                return
            now = self._clock.monotonic()
            deaths = [death for death in deaths if now - death <= self._policy.window_s] + [now]
            delay_s = self._policy.delay_s(deaths, now)
            if delay_s is None:
                text = f"{exit_text}; died {len(deaths)} times within {self._policy.window_s:.0f} s, given up"
                self._on_notice(Notice(spec.name, text, is_final=True))
                if self._essential(spec.name):
                    self._fail(ChildDied(spec.name, text, child.log_path))
                return
            self._on_notice(Notice(spec.name, f"{exit_text}; a replacement starts in {delay_s:.1f} s"))
            await asyncio.sleep(delay_s)
            try:
                self._children[spec.name] = await Child.start(spec, self._log_folder)
            except OSError as error:
                self._fail(ChildDied(spec.name, f"cannot be started again: {error}", child.log_path))
                return
            self._on_notice(Notice(spec.name, f"replaced (pid {self.pid(spec.name)})"))

    async def _wait(self, child: Child) -> int:
        while True:
            try:
                async with asyncio.timeout(LOG_CHECK_S):
                    return await child.wait()
            except TimeoutError:
                child.bound_log()

    def _fail(self, death: ChildDied) -> None:
        if not self.failed.done():
            self.failed.set_result(death)

    async def stop(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Stops all children, stage by stage, each stage at most `grace_s` seconds; at once when `hurry` is set.

        Returns with no child left. Cancelling it kills what is left before the cancellation goes on.
        """
        self._is_stopping = True
        try:
            for keeper in self._keepers.values():
                if not keeper.done() and self._children_ended(keeper):
                    keeper.cancel()  # between a death and the replacement: nothing to stop, and none must be started
            running = [child for child in self._children.values() if child.returncode is None]
            running.sort(key=lambda child: child.spec.stop_stage)
            for _, group in itertools.groupby(running, key=lambda child: child.spec.stop_stage):
                await self._stop_stage(list(group), grace_s, hurry)
        finally:
            for child in self._children.values():
                if child.returncode is None:
                    child.kill_group()
            for keeper in self._keepers.values():
                keeper.cancel()
            await asyncio.gather(*self._keepers.values(), return_exceptions=True)
            await asyncio.gather(*(child.wait() for child in self._children.values()))

    def _children_ended(self, keeper: asyncio.Task[None]) -> bool:
        return any(task is keeper and self._children[name].returncode is not None for name, task in self._keepers.items())

    async def _stop_stage(self, children: Sequence[Child], grace_s: float, hurry: asyncio.Event) -> None:
        stops = [asyncio.create_task(child.stop(grace_s)) for child in children]
        hurried = asyncio.create_task(hurry.wait())
        try:
            everything = asyncio.gather(*stops)
            waited: list[asyncio.Future[Any]] = [everything, hurried]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not everything.done():
                for child in children:
                    child.kill_group()
            for child, ended_itself in zip(children, await everything, strict=True):
                if not ended_itself:
                    self._on_notice(Notice(child.spec.name, f"did not stop within {grace_s:.0f} s and was killed", is_final=True))
        finally:
            for task in (hurried, *stops):
                task.cancel()  # a cancelled stop kills its child before it ends
            await asyncio.gather(hurried, *stops, return_exceptions=True)
