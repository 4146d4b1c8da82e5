"""The supervisor with small real child processes: start, death, replacement, order of the stop, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from baton.children import Child, ChildSpec, describe_exit, tail
from baton.supervisor import Notice, RestartPolicy, Supervisor
from common.clock import SystemClock
from tests.processes import live_children

FAST = RestartPolicy(first_delay_s=0.01, delay_max_s=0.02, restarts_max=3, window_s=60)

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
CRASHER = "import sys; print('about to fail', flush=True); sys.exit(7)"
GRANDPARENT = (
    "import subprocess,sys,time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print('up', p.pid, flush=True); time.sleep(600)"
)
POLITE = """
import pathlib, signal, sys, time
def leave(*_):
    with open(sys.argv[1], "a") as order:
        order.write(sys.argv[2] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
time.sleep(600)
"""


def spec(name: str, code: str, *arguments: str, stage: int = 0) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", code, *arguments), {}, stage)


@asynccontextmanager
async def supervising(
    folder: Path, policy: RestartPolicy = FAST, essential: str = "router"
) -> AsyncIterator[tuple[Supervisor, asyncio.Queue[Notice]]]:
    """A supervisor that is stopped in any case, with a check that it leaves no process of ours."""
    before = live_children()
    notices: asyncio.Queue[Notice] = asyncio.Queue()
    supervisor = Supervisor(
        log_folder=folder,
        clock=SystemClock(),
        policy=policy,
        on_notice=notices.put_nowait,
        essential=lambda name: name == essential,
    )
    try:
        yield supervisor, notices
    finally:
        hurry = asyncio.Event()
        hurry.set()
        await supervisor.stop(5, hurry)
        assert live_children() <= before


async def until_up(log: Path, text: str = "up") -> str:
    """Waits until a child has written to its log; there is no event to wait on across processes, hence the look."""
    await asyncio.to_thread(wait_for, lambda: log.exists() and text in log.read_text())
    return "\n".join(tail(log))


def wait_for(is_so: Callable[[], bool], deadline_s: float = 20) -> None:
    deadline = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < deadline, f"not so within {deadline_s} s"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until_gone(pid: int) -> None:
    await asyncio.to_thread(wait_for, lambda: not is_alive(pid))


async def test_a_child_runs_in_its_own_group_and_writes_to_its_log(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, _):
        await supervisor.start(spec("worker", SLEEPER))
        await until_up(tmp_path / "worker.log")
        pid = supervisor.pid("worker")
        assert os.getpgid(pid) == pid
        assert os.getpgid(pid) != os.getpgid(0)


async def test_a_death_during_start_up_is_final_and_names_the_log(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, notices):
        await supervisor.start(spec("worker", CRASHER))
        death = await asyncio.wait_for(supervisor.failed, 20)
        assert death.name == "worker" and "exit code 7" in str(death)
        assert tail(death.log_path) == ["about to fail"]
        assert notices.empty()


async def test_a_worker_that_is_killed_later_is_replaced_and_that_is_said(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, notices):
        await supervisor.start(spec("worker", SLEEPER))
        await until_up(tmp_path / "worker.log")
        supervisor.start_replacing()
        first_pid = supervisor.pid("worker")
        os.kill(first_pid, signal.SIGKILL)
        said = await asyncio.wait_for(notices.get(), 20)
        assert "killed by SIGKILL" in said.text and not said.is_final
        assert "replaced" in (await asyncio.wait_for(notices.get(), 20)).text
        assert supervisor.pid("worker") != first_pid
        assert is_alive(supervisor.pid("worker"))
        assert not supervisor.failed.done()


async def test_restarts_are_bounded_and_a_worker_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, notices):
        supervisor.start_replacing()
        await supervisor.start(spec("worker", CRASHER))
        texts: list[Notice] = []
        while not texts or not texts[-1].is_final:
            texts.append(await asyncio.wait_for(notices.get(), 20))
        assert sum("replaced" in notice.text for notice in texts) == FAST.restarts_max
        assert "given up" in texts[-1].text
        assert tail(tmp_path / "worker.log").count("about to fail") == FAST.restarts_max + 1
        assert not supervisor.failed.done(), "others can still serve"


async def test_giving_up_an_essential_child_fails_everything(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, _):
        supervisor.start_replacing()
        await supervisor.start(spec("router", CRASHER))
        assert "given up" in str(await asyncio.wait_for(supervisor.failed, 20))


async def test_stages_stop_one_after_the_other_lowest_first(tmp_path: Path) -> None:
    order = tmp_path / "order"
    async with supervising(tmp_path) as (supervisor, notices):
        for name, stage in (("prefill-0", 1), ("router", 0), ("decode-0", 1), ("last", 2)):
            await supervisor.start(spec(name, POLITE, str(order), name, stage=stage))
            await until_up(tmp_path / f"{name}.log")
        supervisor.start_replacing()
        await supervisor.stop(10, asyncio.Event())
        left = order.read_text().split()
        assert left[0] == "router" and left[-1] == "last" and sorted(left[1:3]) == ["decode-0", "prefill-0"]
        assert notices.empty(), "an ordered stop is no death"


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_and_that_is_said(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, notices):
        await supervisor.start(spec("worker", STUBBORN))
        await until_up(tmp_path / "worker.log")
        pid = supervisor.pid("worker")
        started_s = time.monotonic()
        await supervisor.stop(0.2, asyncio.Event())
        assert time.monotonic() - started_s < 5
        assert not is_alive(pid)
        assert "was killed" in notices.get_nowait().text


async def test_a_second_signal_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, _):
        await supervisor.start(spec("worker", STUBBORN))
        await until_up(tmp_path / "worker.log")
        hurry = asyncio.Event()
        stopping = asyncio.create_task(supervisor.stop(60, hurry))
        await asyncio.sleep(0)
        hurry.set()
        await asyncio.wait_for(stopping, 5)


async def test_a_cancelled_stop_still_leaves_nothing(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, _):
        await supervisor.start(spec("worker", STUBBORN))
        await until_up(tmp_path / "worker.log")
        pid = supervisor.pid("worker")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(supervisor.stop(60, asyncio.Event()), 0.1)
        assert not is_alive(pid)


async def test_what_a_child_started_itself_ends_with_it(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, _):
        await supervisor.start(spec("worker", GRANDPARENT))
        content = await until_up(tmp_path / "worker.log", "\n")
        grandchild = int(content.split()[1])
        assert is_alive(grandchild)
        await supervisor.stop(5, asyncio.Event())
        await until_gone(grandchild)


async def test_a_stop_between_a_death_and_its_replacement_starts_nothing(tmp_path: Path) -> None:
    slow = RestartPolicy(first_delay_s=30, delay_max_s=30)
    async with supervising(tmp_path, slow) as (supervisor, notices):
        supervisor.start_replacing()
        await supervisor.start(spec("worker", CRASHER))
        await asyncio.wait_for(notices.get(), 20)
        await asyncio.wait_for(supervisor.stop(5, asyncio.Event()), 5)
        assert tail(tmp_path / "worker.log").count("about to fail") == 1


async def test_a_program_that_does_not_exist_is_an_error_at_once(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervisor, _):
        with pytest.raises(OSError):
            await supervisor.start(ChildSpec("worker", (str(tmp_path / "nothing"),)))


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from baton.children import Child, ChildSpec\n"
        "async def main():\n"
        "    spec = ChildSpec('worker', (sys.executable, '-c', 'import time; time.sleep(600)'))\n"
        "    child = await Child.start(spec, Path(sys.argv[1]))\n"
        "    print(child.pid, flush=True)\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        assert is_alive(child_pid)
        parent.kill()
        parent.wait(timeout=10)
    try:
        psutil.Process(child_pid).wait(timeout=10)
    except psutil.NoSuchProcess:
        pass
    assert not is_alive(child_pid)


async def test_a_log_is_moved_away_when_it_grows_too_large(tmp_path: Path) -> None:
    chatter = "import sys,time\nprint('x' * 5000, flush=True)\nsys.stdin.read()\ntime.sleep(600)"
    child = await Child.start(spec("worker", chatter), tmp_path)
    try:
        await until_up(child.log_path, "\n")
        child.bound_log(bytes_max=10_000)
        assert child.log_path.stat().st_size > 5000, "small enough: left alone"
        child.bound_log(bytes_max=1000)
        assert child.log_path.stat().st_size == 0
        assert (tmp_path / "worker.log.1").stat().st_size > 5000
    finally:
        await child.stop(0)


def test_delays_grow_to_a_maximum_and_old_deaths_are_forgiven() -> None:
    policy = RestartPolicy(first_delay_s=1, factor=2, delay_max_s=5, restarts_max=4, window_s=100)
    assert [policy.delay_s([0.0] * count, now=0) for count in (1, 2, 3, 4, 5)] == [1, 2, 4, 5, None]
    assert policy.delay_s([0.0, 0.0, 0.0, 0.0, 101.0], now=101) == 1


def test_exits_are_described_for_people() -> None:
    assert describe_exit(2) == "exit code 2"
    assert describe_exit(-11) == "killed by SIGSEGV"
    assert describe_exit(-200) == "killed by signal 200"


def test_the_tail_of_a_log_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {index}" for index in range(10_000)))
    assert tail(log, num_lines=3) == ["line 9997", "line 9998", "line 9999"]
    assert sum(len(line) for line in tail(log, num_lines=10**6, bytes_max=1000)) <= 1000
    assert tail(tmp_path / "missing") == []
