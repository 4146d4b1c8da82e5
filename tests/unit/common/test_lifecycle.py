"""Signals become a drain, then a stop; the exit code says how it ended."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from common.lifecycle import EXIT_FAILED, EXIT_GRACE_OVER, EXIT_OK, Lifecycle
from common.types import WorkerState


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains_and_the_second_stops(number: signal.Signals) -> None:
    lifecycle = Lifecycle()
    lifecycle.install_signal_handlers()
    try:
        lifecycle.ready()
        assert lifecycle.state is WorkerState.READY
        os.kill(os.getpid(), number)
        await asyncio.wait_for(lifecycle.drain_asked(), 5)
        assert lifecycle.state is WorkerState.DRAINING
        assert not lifecycle.is_stopping
        os.kill(os.getpid(), number)
        assert not await asyncio.wait_for(lifecycle.wait_drained(asyncio.Event(), 60), 5)
        assert lifecycle.is_stopping
        assert lifecycle.exit_code == EXIT_GRACE_OVER
    finally:
        lifecycle.remove_signal_handlers()
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


async def test_work_that_ends_within_the_grace_is_success() -> None:
    lifecycle, drained = Lifecycle(), asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, drained.set)
    assert await asyncio.wait_for(lifecycle.wait_drained(drained, 60), 5)
    assert lifecycle.exit_code == EXIT_OK


async def test_the_grace_limit_ends_the_wait_with_its_own_code() -> None:
    lifecycle = Lifecycle()
    assert not await asyncio.wait_for(lifecycle.wait_drained(asyncio.Event(), 0.01), 5)
    assert lifecycle.exit_code == EXIT_GRACE_OVER


async def test_a_failure_on_another_thread_ends_the_wait_and_wins_the_exit_code() -> None:
    lifecycle = Lifecycle()
    thread = threading.Thread(target=lifecycle.fail_threadsafe, args=("engine_failed",), kwargs={"event_detail": 1, "event": "x"})
    thread.start()
    await asyncio.wait_for(lifecycle.drain_asked(), 5)
    thread.join()
    assert lifecycle.is_stopping
    assert not await asyncio.wait_for(lifecycle.wait_drained(asyncio.Event(), 60), 5)
    assert lifecycle.exit_code == EXIT_FAILED


def test_a_failure_after_the_loop_is_closed_still_sets_the_exit_code() -> None:
    async def make() -> Lifecycle:
        return Lifecycle()

    lifecycle = asyncio.run(make())
    lifecycle.fail_threadsafe("engine_failed")
    assert lifecycle.exit_code == EXIT_FAILED


async def test_ready_after_a_drain_was_asked_does_not_undo_it() -> None:
    lifecycle = Lifecycle()
    lifecycle.ask_drain()
    await lifecycle.drain_asked()
    lifecycle.ready()
    assert lifecycle.state is WorkerState.DRAINING


async def test_a_cancelled_wait_leaves_no_task_behind() -> None:
    lifecycle = Lifecycle()
    task = asyncio.create_task(lifecycle.wait_drained(asyncio.Event(), 60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}
