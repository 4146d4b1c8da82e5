"""The tasks of one fabric endpoint: each is kept until it ends, none fails unseen, and all end together.

It must not know what the tasks do. An exception that leaves a task is a bug in the fabric or its copier; it goes to the
endpoint's `on_fatal`, which stops the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

OnFatal = Callable[[BaseException], None]


def report_to_loop(error: BaseException) -> None:
    """The default `on_fatal`: the event loop's exception handler."""
    asyncio.get_running_loop().call_exception_handler({"message": "KV fabric task failed", "exception": error})


class TaskSet:
    def __init__(self, on_fatal: OnFatal) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_fatal = on_fatal

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait(self, timeout_s: float) -> bool:
        """Waits until no task is left; False if some are after `timeout_s`."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        return not self._tasks

    async def cancel(self, timeout_s: float) -> bool:
        """Cancels all tasks and waits for them; False if some did not end in time."""
        for task in self._tasks:
            task.cancel()
        return await self.wait(timeout_s)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fatal(error)
