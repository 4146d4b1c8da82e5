"""`baton up` from start to end with stand-in services and the real embedded store: what it shows, how it ends, what is left."""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from baton import up as up_module
from baton.children import ChildSpec
from baton.fleet_plan import STOP_ROUTER, STOP_WORKERS, FleetOptions, Surroundings
from baton.instance import Instance, find_running
from baton.main import build_parser
from baton.subprocess_probe import Outcome
from baton.up import StartFailed, Up, options_from
from common.state.open import open_store
from tests.processes import live_children

FAKE = str(Path(__file__).with_name("fake_fleet.py"))


class World:
    """One `baton up` with stand-ins in a folder of its own; `output` is what it printed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.children_before = live_children()
        self.output = io.StringIO()
        self.manner = {"prefill-0": "good", "decode-0": "good"}
        self.model = Outcome(0, "/models/demo\n", "")
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        monkeypatch.setattr(up_module, "plan_fleet", self._plan)
        monkeypatch.setattr(up_module, "stream_python", self._resolve)

    async def _resolve(self, arguments: list[str], on_line: Callable[[str], None]) -> Outcome:
        on_line("converting")
        return self.model

    def _plan(self, options: FleetOptions, around: Surroundings) -> list[ChildSpec]:
        def child(name: str, stage: int, *words: str) -> ChildSpec:
            return ChildSpec(name, (sys.executable, FAKE, *words), around.env, stage)

        workers = [child(name, STOP_WORKERS, "worker", str(self.folder), name, manner) for name, manner in self.manner.items()]
        return [child("router", STOP_ROUTER, "router", str(self.folder), str(around.port)), *workers]

    def up(self, *flags: str, ready_fd: int = -1) -> Up:
        arguments = build_parser().parse_args(["up", "--port", "0", "--transport", "tcp", "--redis-url", "", *flags])
        return Up(options_from(arguments), Console(file=self.output, width=160), ready_fd)

    async def until_serving(self, running: asyncio.Task[int], read_fd: int) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(read_fd, readable.set)
        try:
            waiting = asyncio.create_task(readable.wait())
            await asyncio.wait([running, waiting], timeout=60, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        finally:
            loop.remove_reader(read_fd)
        if running.done():
            running.result()
        assert os.read(read_fd, 10) == b"ready\n", self.output.getvalue()

    def assert_nothing_left(self) -> None:
        assert live_children() <= self.children_before
        assert not Instance("default").is_running()
        assert {path.name for path in (self.folder / "state" / "baton" / "default").iterdir()} == {"lock", "logs"}


@pytest.fixture
def world(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path_factory.mktemp("u"), monkeypatch)


@pytest.fixture
def pipe() -> object:
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)


async def test_from_start_to_ctrl_c(world: World, pipe: tuple[int, int]) -> None:
    running = asyncio.create_task(world.up(ready_fd=pipe[1]).run())
    await world.until_serving(running, pipe[0])
    description = find_running("default")
    assert description.pid == os.getpid() and description.redis_url.startswith("unix://")
    store = open_store(description.redis_url, description.cluster)
    await store.start()
    assert await store.ping(), "the embedded store is real"
    await store.close()

    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(running, 30) == 0

    assert (world.folder / "order").read_text().split()[0] == "router"
    assert sorted((world.folder / "order").read_text().split()[1:]) == ["decode-0", "prefill-0"]
    world.assert_nothing_left()
    shown = world.output.getvalue()
    assert "Runners pass a baton." in shown
    for words in (
        "prefill-0 → decode-0",
        "3.0 MiB in 2 frames over ucx",
        "first token after",
        f"curl -N {description.url}/v1/chat",
    ):
        assert words in shown


async def test_a_self_check_that_did_not_use_both_workers_fails_the_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "local")
    with pytest.raises(StartFailed, match="mode local: short prompt"):
        await world.up().run()
    world.assert_nothing_left()


async def test_a_worker_that_dies_while_serving_is_replaced(world: World, pipe: tuple[int, int]) -> None:
    running_up = world.up("--no-self-check", ready_fd=pipe[1])
    running = asyncio.create_task(running_up.run())
    await world.until_serving(running, pipe[0])
    victim = running_up._supervisor.pid("decode-0")
    os.kill(victim, signal.SIGKILL)
    await asyncio.wait_for(asyncio.to_thread(_until, lambda: "decode-0: replaced" in world.output.getvalue()), 30)
    assert running_up._supervisor.pid("decode-0") != victim
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 30) == 0
    assert "killed by SIGKILL" in world.output.getvalue()
    world.assert_nothing_left()


async def test_a_store_that_dies_is_replaced_under_the_same_address(world: World, pipe: tuple[int, int]) -> None:
    running_up = world.up("--no-self-check", ready_fd=pipe[1])
    running = asyncio.create_task(running_up.run())
    await world.until_serving(running, pipe[0])
    url = find_running("default").redis_url
    os.kill(running_up._supervisor.pid("store"), signal.SIGKILL)
    await asyncio.wait_for(asyncio.to_thread(_until, lambda: "store: replaced" in world.output.getvalue()), 30)
    store = open_store(url, "c")
    await store.start()
    async with asyncio.timeout(10):
        while not await store.ping():  # noqa: ASYNC110  the server is another process: there is no event to wait on
            await asyncio.sleep(0.02)
    await store.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 30) == 0
    world.assert_nothing_left()


async def test_a_worker_that_does_not_start_ends_it_with_the_end_of_its_log(world: World) -> None:
    world.manner["decode-0"] = "broken"
    with pytest.raises(StartFailed, match="decode-0.*exit code 3") as failure:
        await world.up().run()
    assert failure.value.log_path is not None and "model file is truncated" in failure.value.log_path.read_text()
    world.assert_nothing_left()


async def test_a_worker_that_never_gets_ready_is_named_after_the_deadline(world: World) -> None:
    world.manner["decode-0"] = "slow"
    with pytest.raises(StartFailed, match="1 of 1 prefill, 0 of 1 decode"):
        await world.up("--ready-timeout", "2").run()
    world.assert_nothing_left()


async def test_ctrl_c_during_the_start_is_an_ordered_end(world: World) -> None:
    world.manner["decode-0"] = "slow"
    running = asyncio.create_task(world.up().run())
    await asyncio.wait_for(asyncio.to_thread(_until, (world.folder / "ready.prefill-0").exists), 30)
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(running, 30) == 0
    world.assert_nothing_left()


async def test_a_model_that_cannot_be_used_gives_one_line_and_code_2(world: World) -> None:
    world.model = Outcome(2, "", "downloading\nerror: x.gguf: truncated, 10 of 20 bytes\n")
    with pytest.raises(StartFailed, match=r"^x\.gguf: truncated, 10 of 20 bytes$") as failure:
        await world.up().run()
    assert failure.value.exit_code == 2
    world.assert_nothing_left()


async def test_a_given_store_that_is_not_there_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.store_server.PING_WAITS_S", (0.01, 0.01))
    with pytest.raises(StartFailed, match="did not answer"):
        await world.up("--redis-url", "redis://127.0.0.1:9").run()
    world.assert_nothing_left()


def test_a_failed_start_is_shown_with_the_log_and_a_code(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.manner["decode-0"] = "broken"
    arguments = build_parser().parse_args(["up", "--port", "0", "--transport", "tcp", "--redis-url", ""])
    assert up_module.run(arguments) == 1
    shown = capsys.readouterr().err
    assert "decode-0: ended during start-up (exit code 3)" in shown and "model file is truncated" in shown
    world.assert_nothing_left()


def test_a_taken_port_starts_nothing(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments: argparse.Namespace = build_parser().parse_args(["up", "--port", str(taken.getsockname()[1])])
        assert up_module.run(arguments) == 1
    assert "--port" in capsys.readouterr().err
    assert not (world.folder / "ready.prefill-0").exists()
    world.assert_nothing_left()


def _until(is_so: Callable[[], bool]) -> None:
    import time

    while not is_so():
        time.sleep(0.01)
