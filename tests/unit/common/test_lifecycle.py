"""Signals become a drain, then a stop; the exit code says how it ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from common.lifecycle import EXIT_FAILED, EXIT_GRACE_OVER, EXIT_OK, Lifecycle
from common.types import WorkerState

ROOT = Path(__file__).resolve().parents[3]


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


async def test_the_first_signal_after_a_drain_by_other_means_lets_the_drain_go_on() -> None:
    """An orchestrator asks for a drain before it ends a process: its one SIGTERM must not abort what still runs."""
    lifecycle = Lifecycle()
    lifecycle.install_signal_handlers()
    try:
        lifecycle.ask_drain()
        for _ in range(2):
            assert not lifecycle.is_stopping
            handled = asyncio.Event()
            os.kill(os.getpid(), signal.SIGTERM)
            asyncio.get_running_loop().call_later(0, handled.set)
            await handled.wait()
            await asyncio.sleep(0)
        assert not await asyncio.wait_for(lifecycle.wait_drained(asyncio.Event(), 60), 5)
        assert lifecycle.is_stopping, "the second signal stops"
    finally:
        lifecycle.remove_signal_handlers()


async def test_a_failure_on_another_thread_sets_the_exit_code_even_if_the_loop_never_turns_again() -> None:
    lifecycle = Lifecycle()
    thread = threading.Thread(target=lifecycle.fail_threadsafe, args=("engine_failed",))
    thread.start()
    thread.join()
    assert lifecycle.exit_code == EXIT_FAILED


PROCESS = """
import asyncio, sys
from common.lifecycle import Lifecycle

async def main():
    lifecycle = Lifecycle()
    lifecycle.install_signal_handlers()
    lifecycle.ready()
    print("ready", flush=True)
    await lifecycle.drain_asked()
    print(lifecycle.state.value, flush=True)
    drained = asyncio.Event()
    if sys.argv[1] == "idle":
        drained.set()
    elif sys.argv[1] == "broken":
        lifecycle.fail("engine_failed")
    await lifecycle.wait_drained(drained, float(sys.argv[2]))
    return lifecycle.exit_code

sys.exit(asyncio.run(main()))
"""


@pytest.mark.parametrize(
    ("work", "grace_s", "signals", "exit_code"),
    [
        ("idle", 60.0, [signal.SIGTERM], EXIT_OK),
        ("endless", 0.05, [signal.SIGTERM], EXIT_GRACE_OVER),
        ("endless", 60.0, [signal.SIGTERM, signal.SIGTERM], EXIT_GRACE_OVER),
        ("endless", 60.0, [signal.SIGINT, signal.SIGTERM], EXIT_GRACE_OVER),
        ("broken", 60.0, [signal.SIGTERM], EXIT_FAILED),
    ],
)
def test_a_process_ends_by_its_signals_with_the_code_that_says_how(
    work: str, grace_s: float, signals: list[signal.Signals], exit_code: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, work, str(grace_s)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signals[0])
        assert process.stdout.readline() == "draining\n"
        for number in signals[1:]:
            process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == exit_code, errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()
