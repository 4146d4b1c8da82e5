"""Claims about the engine thread: it blocks when idle, posts events per step, dies loudly once, and stops cleanly."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from common.clock import SystemClock
from common.errors import Overloaded, WorkerUnavailable
from common.types import FinishReason
from engine.batch import StepBatch, StepResults
from engine.commands import Abort, Generate, Prefill, ReleaseHandoff, Reserve, Reserved, Sampled, SequenceEnded, StepEvents
from engine.engine_loop import EngineLoop
from tests.fakes.engine_driver import EngineDriver, key, make_spec
from tests.fakes.kv_oracle import lone_run

DEADLINE_S = 20.0


class Gate:
    """A runner that waits for a permit before each step, and says that it has begun one."""

    def __init__(self, driver: EngineDriver) -> None:
        self.runner = driver.runner
        self.has_begun = threading.Event()
        self.permits = threading.Semaphore(0)

    def run(self, batch: StepBatch) -> StepResults:
        self.has_begun.set()
        assert self.permits.acquire(timeout=DEADLINE_S)
        return self.runner.run(batch)


class Harness:
    def __init__(self, *, runner=None, on_events=None, on_step=None, command_queue_max: int = 64, **settings) -> None:
        self.driver = EngineDriver(**settings)
        self.runner = self.driver.runner if runner is None else runner(self.driver)
        self.posted: queue.Queue[StepEvents] = queue.Queue()
        self.fatal: queue.Queue[BaseException] = queue.Queue()
        self.loop = EngineLoop(
            self.driver.scheduler,
            self.runner,
            clock=SystemClock(),
            on_events=on_events or self.posted.put,
            on_fatal=self.fatal.put,
            on_step=on_step or (lambda seconds: None),
            command_queue_max=command_queue_max,
        )
        self.loop.start()

    def next(self) -> StepEvents:
        return self.posted.get(timeout=DEADLINE_S)

    def until_ended(self, *names: str) -> list[StepEvents]:
        """All posts until these sequences have ended."""
        posts, open_keys = [], {key(name) for name in names}
        while open_keys:
            posts.append(self.next())
            open_keys -= {event.key for event in posts[-1].events if isinstance(event, SequenceEnded)}
        return posts


@pytest.fixture
def harness(request):
    made: list[Harness] = []

    def make(**options) -> Harness:
        made.append(Harness(**options))
        return made[-1]

    yield make
    for one in made:
        if isinstance(one.runner, Gate):
            one.runner.permits.release(10_000)
        assert one.loop.stop(DEADLINE_S), "the engine thread is still alive"


def test_tokens_of_a_step_come_as_one_post_and_equal_a_lone_run(harness) -> None:
    gated = harness(runner=Gate)
    gated.loop.submit(Generate(make_spec("a", range(3), 6)))
    assert gated.runner.has_begun.wait(DEADLINE_S)
    gated.loop.submit(Generate(make_spec("b", range(50, 53), 5)))
    gated.runner.permits.release(10_000)
    posts = gated.until_ended("a", "b")
    for name, first in (("a", 0), ("b", 50)):
        tokens = [
            event.token_ids[0] for post in posts for event in post.events if isinstance(event, Sampled) and event.key == key(name)
        ]
        assert tokens == lone_run(make_spec(name, range(first, first + 3), 6 if name == "a" else 5), 97)
    assert len(posts) == 6, "one post per step, with the tokens of both sequences"
    assert [post.now for post in posts] == sorted(post.now for post in posts)


def test_an_idle_engine_waits_without_a_timeout_and_wakes_at_each_command(harness) -> None:
    idle = harness()
    idle.loop.submit(Generate(make_spec("a", range(3), 2)))
    idle.until_ended("a")
    num_wakeups = 0
    real_wait = idle.loop._wakeup.wait

    def counting_wait(timeout=None):
        nonlocal num_wakeups
        num_wakeups += 1
        assert timeout is None, "a timeout would be polling"
        return real_wait(timeout)

    idle.loop._wakeup.wait = counting_wait
    for name in "bcd":
        idle.loop.submit(Generate(make_spec(name, range(3), 2)))
        idle.until_ended(name)
    assert num_wakeups <= 4, "it waited once between two commands, not in a loop"


def test_sequences_that_only_wait_for_blocks_cost_no_steps(harness) -> None:
    engine = harness(num_blocks=8)
    engine.loop.submit(Prefill(make_spec("a", range(30), 2)))
    engine.until_ended("a")
    engine.loop.submit(Generate(make_spec("b", range(100, 110), 2)))
    engine.loop.submit(Abort(key("nobody"), "a command that changes nothing"))
    engine.loop.submit(Reserve(make_spec("r", [1], 2)))
    assert engine.next().events[0].key == key("r"), "refused behind b"
    num_steps = engine.driver.runner.num_steps
    engine.loop.submit(ReleaseHandoff(key("a")))
    engine.until_ended("b")
    assert engine.driver.runner.num_steps == num_steps + 2


def test_what_a_command_gives_does_not_wait_for_the_step(harness) -> None:
    gated = harness(runner=Gate)
    gated.loop.submit(Generate(make_spec("a", range(3), 2)))
    assert gated.runner.has_begun.wait(DEADLINE_S)
    gated.loop.submit(Reserve(make_spec("b", range(9), 2)))
    gated.runner.permits.release(1)
    assert isinstance(gated.next().events[0], Sampled)
    assert isinstance(gated.next().events[0], Reserved), "while the second step is still held back"
    assert gated.loop.census().held_by["seq:rb#1"] == 3
    gated.loop.submit(Abort(key("b"), "test"))


def test_views_show_the_end_when_its_event_is_posted(harness) -> None:
    seen = []
    engine: Harness

    def on_events(step: StepEvents) -> None:
        seen.append((step, engine.loop.census(), engine.loop.load()))
        if any(isinstance(event, SequenceEnded) for event in step.events):
            done.set()

    done = threading.Event()
    engine = harness(on_events=on_events)
    engine.loop.submit(Generate(make_spec("a", range(9), 3)))
    assert done.wait(DEADLINE_S)
    _, census, load = seen[-1]
    assert census.held == 0 and load.num_running == 0
    assert seen[0][1].held == 3 and seen[0][2].num_running == 1


def test_each_step_is_timed_and_counted(harness) -> None:
    step_seconds: queue.Queue[float] = queue.Queue()
    engine = harness(on_step=step_seconds.put)
    engine.loop.submit(Generate(make_spec("a", range(9), 3)))
    engine.until_ended("a")
    times = [step_seconds.get(timeout=DEADLINE_S) for _ in range(3)]
    assert all(0 < seconds < DEADLINE_S for seconds in times) and step_seconds.empty()
    assert engine.loop.counts().num_steps == 3 and engine.loop.counts().num_prompt_tokens == 9


@pytest.mark.parametrize("place", ["runner", "scheduler", "on_events"])
def test_an_error_ends_the_thread_is_told_once_and_later_commands_are_refused(harness, place: str) -> None:
    class Broken:
        def __init__(self, driver: EngineDriver) -> None:
            pass

        def run(self, batch: StepBatch) -> StepResults:
            raise RuntimeError("broken: runner")

    def broken_events(step: StepEvents) -> None:
        raise RuntimeError("broken: on_events")

    engine = harness(runner=Broken if place == "runner" else None, on_events=broken_events if place == "on_events" else None)
    if place == "scheduler":
        engine.driver.allocator._free.pop()
    engine.loop.submit(Generate(make_spec("a", range(9), 1)))
    error = engine.fatal.get(timeout=DEADLINE_S)
    assert "accounted for" in str(error) if place == "scheduler" else str(error) == f"broken: {place}"
    assert engine.loop.stop(DEADLINE_S)
    assert engine.fatal.empty()
    with pytest.raises(WorkerUnavailable):
        engine.loop.submit(Generate(make_spec("b", range(9))))


def test_a_block_that_leaks_is_noticed_when_the_engine_becomes_idle(harness) -> None:
    engine = harness()
    engine.driver.allocator.allocate("seq:forgotten", 1)
    engine.loop.submit(Generate(make_spec("a", range(3), 1)))
    assert "Holds without a reason" in str(engine.fatal.get(timeout=DEADLINE_S))


def test_stop_ends_what_lives_and_refuses_commands(harness) -> None:
    gated = harness(runner=Gate, max_sequences=2)
    for name in "abc":
        gated.loop.submit(Generate(make_spec(name, range(5), 100)))
    assert gated.runner.has_begun.wait(DEADLINE_S)
    assert not gated.loop.stop(0.01), "a step is still running"
    with pytest.raises(WorkerUnavailable):
        gated.loop.submit(Generate(make_spec("d", range(5))))
    gated.runner.permits.release(1)
    assert gated.loop.stop(DEADLINE_S)
    ends = [event for post in gated.until_ended("a") for event in post.events if isinstance(event, SequenceEnded)]
    assert {event.reason for event in ends} == {FinishReason.ABORT}
    gated.driver.assert_no_block_held()
    assert gated.fatal.empty()
    assert gated.loop.stop(0.0), "idempotent"


def test_stop_before_start_returns_at_once() -> None:
    driver = EngineDriver()
    loop = EngineLoop(driver.scheduler, driver.runner, clock=SystemClock(), on_events=print, on_fatal=print)
    assert loop.stop(0.0)


def test_a_full_queue_refuses_new_sequences_but_still_takes_what_frees_memory(harness) -> None:
    gated = harness(runner=Gate, command_queue_max=3)
    gated.loop.submit(Generate(make_spec("a", range(3), 9)))
    assert gated.runner.has_begun.wait(DEADLINE_S)
    for index in range(3):
        gated.loop.submit(Generate(make_spec(index, range(3))))
    with pytest.raises(Overloaded, match="3 commands wait") as refusal:
        gated.loop.submit(Generate(make_spec("over", range(3))))
    assert refusal.value.retry_after_s
    for index in range(3):
        gated.loop.submit(Abort(key(index), "client left"))
    with pytest.raises(Overloaded, match="6 commands wait"):
        gated.loop.submit(Abort(key("a"), "client left"))
    gated.runner.permits.release(1)
    gated.until_ended("0", "1", "2")
    gated.loop.submit(Abort(key("a"), "client left"))


def test_a_step_that_takes_long_shows_as_a_stall(harness) -> None:
    gated = harness(runner=Gate)
    assert gated.loop.stalled_for_s(time.monotonic() + 5) == 0.0
    gated.loop.submit(Generate(make_spec("a", range(3), 1)))
    assert gated.runner.has_begun.wait(DEADLINE_S)
    assert 4.0 < gated.loop.stalled_for_s(time.monotonic() + 5) < 5.0 + DEADLINE_S


def test_commands_from_many_threads_all_arrive(harness) -> None:
    engine = harness(num_blocks=256, command_queue_max=1000, max_sequences=16)

    def submit(thread: int) -> None:
        for index in range(10):
            engine.loop.submit(Generate(make_spec(f"{thread}-{index}", range(thread, thread + 5), 3)))

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    names = [f"{thread}-{index}" for thread in range(4) for index in range(10)]
    posts = engine.until_ended(*names)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sum(isinstance(event, Sampled) for post in posts for event in post.events) == 120
