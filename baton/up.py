"""`baton up`: a whole fleet on this machine, from the model's files to the first streamed answer, until Ctrl-C.

Starts the store, the router and the workers as processes (never imports them), shows how far they are, proves the path with one
request, then replaces workers that die. However it ends, it ends with no process, socket or folder of its own left but the logs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.children import ChildSpec, tail
from baton.display import OK, WORKING, StartDisplay
from baton.fleet_plan import STOP_STORE, FleetOptions, PlanError, Surroundings, check_options, plan_fleet, served_model_name
from baton.instance import Description, Instance, InstanceError
from baton.listen import PortTaken, choose_port, reachable_url
from baton.openai_stream import StreamFailed
from baton.planes_probe import PLANES_PROBE
from baton.readiness import NotReady, wait_ready
from baton.store_server import NAME as STORE
from baton.store_server import StoreFailed, StoreServer
from baton.subprocess_probe import child_environment, probe_json, stream_python
from baton.supervisor import ChildDied, Notice, RestartPolicy, Supervisor
from baton.up_report import show_address, show_self_check
from common.clock import SystemClock
from common.state.open import open_store

STOP_MARGIN_S = 5.0
"""Seconds a child may take beyond its own drain grace before it is killed."""


class StartFailed(Exception):
    """A line for the user and the exit code. `log_path`: where to look, its end is shown."""

    def __init__(self, message: str, exit_code: int = 1, log_path: Path | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.log_path = log_path


class Stopped(Exception):
    """The user asked to stop before the fleet was up."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The whole request of one `baton up`."""

    instance: str
    model: str
    fleet: FleetOptions
    redis_url: str
    ready_timeout_s: float
    has_self_check: bool
    api_key: str = field(default="", repr=False)


def options_from(arguments: argparse.Namespace) -> UpOptions:
    """Raises PlanError when the flags do not fit together."""
    fleet = FleetOptions(
        num_prefill=arguments.prefill,
        num_decode=arguments.decode,
        host=arguments.host,
        port=arguments.port,
        transport=arguments.transport,
        model_name=arguments.served_model_name or served_model_name(arguments.model),
        cpus_prefill=arguments.cpus_prefill,
        cpus_decode=arguments.cpus_decode,
        dtype=arguments.dtype,
        block_size=arguments.block_size,
        num_blocks=arguments.num_blocks,
        threads=arguments.threads,
        drain_grace_s=arguments.drain_grace,
    )
    check_options(fleet)
    return UpOptions(
        instance=arguments.instance,
        model=arguments.model,
        fleet=fleet,
        redis_url=arguments.redis_url,
        ready_timeout_s=arguments.ready_timeout,
        has_self_check=arguments.self_check,
        api_key=arguments.api_key,
    )


class Up:
    """One run. The parts that must be ended are started and ended in `run`."""

    def __init__(self, options: UpOptions, console: Console, ready_fd: int = -1) -> None:
        self._options = options
        self._console = console
        self._ready_fd = ready_fd
        self._instance = Instance(options.instance)
        self._cluster = f"up-{secrets.token_hex(4)}"
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._store = StoreServer(options.redis_url, self._instance.run_folder)
        self._supervisor = Supervisor(
            log_folder=self._instance.log_folder,
            clock=SystemClock(),
            policy=RestartPolicy(),
            on_notice=self._notice,
            essential=lambda name: name in ("router", STORE),
        )

    async def run(self) -> int:
        """Raises StartFailed, InstanceError and PortTaken with a line for the user."""
        self._instance.acquire()
        try:
            self._listen_to_signals()
            try:
                await self._until_stopped(self._start())
                await self._until_stopped(asyncio.Event().wait())
            except Stopped:
                pass
            except ChildDied as death:
                raise StartFailed(str(death), log_path=death.log_path) from death
            finally:
                await self._shut_down()
            return 0
        finally:
            self._instance.release()

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _until_stopped(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs `work` until it ends. Raises Stopped or ChildDied, with the work cancelled and ended, when that comes first."""
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(work), asyncio.create_task(self._stop.wait())]
        waited: list[asyncio.Future[Any]] = [*tasks, self._supervisor.failed]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                raise Stopped
            if self._supervisor.failed.done():
                raise self._supervisor.failed.result()
            tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self) -> None:
        options = self._options
        port = choose_port(options.fleet.host, options.fleet.port)
        url = reachable_url(options.fleet.host, port)
        with StartDisplay(self._console) as display:
            try:
                await self._start_fleet(display, port, url)
            except BaseException:
                display.fail_unfinished()
                raise
        if options.has_self_check:
            await self._self_check(url)
        self._supervisor.start_replacing()
        show_address(self._console, url, self._options.fleet.model_name, self._instance.log_folder)
        if self._ready_fd >= 0:
            os.write(self._ready_fd, b"ready\n")
            os.close(self._ready_fd)
            self._ready_fd = -1

    async def _start_fleet(self, display: StartDisplay, port: int, url: str) -> None:
        options = self._options
        display.set("model", WORKING, options.model)
        model_folder = await self._resolve_model(display)
        display.set("model", OK, f"{options.fleet.model_name} in {model_folder}")
        display.set("store", WORKING)
        try:
            self._store.prepare(STOP_STORE)
            if self._store.spec is not None:
                await self._start_child(self._store.spec)
            await self._store.wait()
        except StoreFailed as error:
            raise StartFailed(str(error)) from error
        display.set("store", OK, self._store.describe())
        transport = await self._choose_transport(display)
        specs = self._plan(model_folder, port, transport)
        description = Description(os.getpid(), url, self._store.url, self._cluster, options.fleet.model_name, time.time())
        self._instance.describe(description)
        for spec in specs:
            display.set(spec.name, WORKING, "starting")
            await self._start_child(spec)
        await self._wait_ready(display, url, specs)

    async def _start_child(self, spec: ChildSpec) -> None:
        try:
            await self._supervisor.start(spec)
        except OSError as error:
            raise StartFailed(f"{spec.name} cannot be started: {error}") from error

    async def _wait_ready(self, display: StartDisplay, url: str, specs: list[ChildSpec]) -> None:
        roles = {spec.name: spec.name.rpartition("-")[0] for spec in specs if spec.name != "router"}
        store = open_store(self._store.url, self._cluster)
        await store.start()
        try:
            await wait_ready(
                url,
                {spec.name: self._instance.log_folder / f"{spec.name}.log" for spec in specs},
                roles,
                store.list_workers,
                self._options.ready_timeout_s,
                lambda name, is_ready, detail: display.set(name, OK if is_ready else WORKING, detail),
            )
        except NotReady as error:
            raise StartFailed(f"{error}; logs are in {self._instance.log_folder}") from error
        finally:
            await store.close()

    async def _resolve_model(self, display: StartDisplay) -> str:
        outcome = await stream_python(
            ["-m", "engine.model_folder", self._options.model], lambda line: display.set("model", WORKING, line)
        )
        lines = outcome.stdout.strip().splitlines()
        if outcome.returncode != 0 or not lines:
            raise StartFailed(outcome.reason.removeprefix("error: "), exit_code=2)
        return lines[-1]

    async def _choose_transport(self, display: StartDisplay) -> str:
        """`auto` takes ucx where it works; that it does not is shown, never silent."""
        if self._options.fleet.transport != "auto":
            return self._options.fleet.transport
        display.set("transport", WORKING, "looking for UCX")
        try:
            planes = await asyncio.to_thread(probe_json, PLANES_PROBE, 60.0)
            why_not = planes["ucx"]
        except (RuntimeError, KeyError) as error:
            why_not = str(error)
        display.set("transport", OK, "ucx" if why_not is None else f"tcp (no ucx: {why_not})")
        return "ucx" if why_not is None else "tcp"

    def _plan(self, model_folder: str, port: int, transport: str) -> list[ChildSpec]:
        around = Surroundings(
            python=sys.executable,
            model_folder=model_folder,
            redis_url=self._store.url,
            cluster=self._cluster,
            num_cpus=len(os.sched_getaffinity(0)),
            port=port,
            transport=transport,
            env=child_environment() | {"BATON_CLUSTER_SECRET": secrets.token_hex(32)},
        )
        return plan_fleet(self._options.fleet, around)

    async def _self_check(self, url: str) -> None:
        fleet = self._options.fleet
        try:
            await show_self_check(
                self._console, url, fleet.model_name, wants_handoff=fleet.num_prefill > 0, api_key=self._options.api_key
            )
        except StreamFailed as error:
            self._console.print()
            raise StartFailed(f"the self-check failed: {error}", log_path=self._instance.log_folder / "router.log") from error

    def _notice(self, notice: Notice) -> None:
        self._console.print(
            f"{notice.name}: {notice.text}", style="red" if notice.is_final else "yellow", markup=False, highlight=False
        )

    async def _shut_down(self) -> None:
        """Router first, then workers, then the store; each bounded. Runs to its end even when it goes wrong in the middle."""
        self._console.print("stopping", highlight=False)
        try:
            await self._supervisor.stop(self._options.fleet.drain_grace_s + STOP_MARGIN_S, self._hurry)
        finally:
            self._store.clean()
        self._console.print("stopped; nothing is left running", highlight=False)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 after an ordered stop, 2 for a model or flags that cannot be used, 1 for everything else that failed."""
    console = Console()
    errors = Console(stderr=True)
    try:
        options = options_from(arguments)
        if arguments.detach:
            from baton.detach import start_detached

            return start_detached(arguments, console)
        return asyncio.run(_main(options, console, arguments.ready_fd))
    except PlanError as error:
        errors.print(f"baton up: {error}", style="red", markup=False)
        return 2
    except (InstanceError, PortTaken) as error:
        errors.print(f"baton up: {error}", style="red", markup=False)
        return 1
    except StartFailed as error:
        errors.print(f"baton up: {error}", style="red", markup=False)
        if error.log_path is not None:
            errors.print(f"the end of {error.log_path}:", style="dim", markup=False)
            for line in tail(error.log_path):
                errors.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        return error.exit_code


async def _main(options: UpOptions, console: Console, ready_fd: int) -> int:
    return await Up(options, console, ready_fd).run()
