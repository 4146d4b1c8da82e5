"""One child process of `baton up`: start, wait, stop, and the end of its log.

A child has its own process group (Ctrl-C at the terminal reaches only `baton up`, which drains in order) and is killed by the
kernel when `baton up` dies, however that happens. A child's output goes to a file that this module keeps below a size.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LOG_BYTES_MAX = 32 << 20
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `env` is added to the environment of `baton up`; `stop_stage` orders the shutdown, lowest first."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    stop_stage: int = 0


def die_with_parent(parent_pid: int) -> Callable[[], None]:
    """A hook for the forked child: SIGKILL it when its parent thread ends. Loaded before the fork, so the child only calls."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def hook() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent died between fork and prctl: the signal would never come
            os._exit(1)

    return hook


class Child:
    """A process that was started. Make one with `Child.start`."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self._process = process

    @classmethod
    async def start(cls, spec: ChildSpec, log_folder: Path) -> Child:
        """Starts the process. Call it on the main thread: the kernel ties the child's life to the thread that forks.

        Raises OSError when the program cannot be started.
        """
        log_path = log_folder / f"{spec.name}.log"
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **spec.env},
                process_group=0,
                preexec_fn=die_with_parent(os.getpid()),
            )
        return cls(spec, process, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Signals the child alone; nothing happens when it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill_group(self) -> None:
        """Kills the child and whatever it started in its group; right after its end too, when helpers may be left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL after `grace_s` seconds. Returns whether it ended by itself. Always ends with the child gone."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self.kill_group()
            await self.wait()

    def bound_log(self, bytes_max: int = LOG_BYTES_MAX) -> None:
        """Moves a log that grew too large to `<name>.log.1` (replacing the last one). The child appends, so it goes on at 0."""
        try:
            if self.log_path.stat().st_size <= bytes_max:
                return
            shutil.copyfile(self.log_path, self.log_path.with_suffix(".log.1"))
            os.truncate(self.log_path, 0)
        except FileNotFoundError:
            return


def tail(path: Path, num_lines: int = 15, bytes_max: int = 16 << 10) -> list[str]:
    """The last lines of a log, at most `bytes_max` bytes of it; empty if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - bytes_max))
            return log.read().decode(errors="replace").splitlines()[-num_lines:]
    except OSError:
        return []


def describe_exit(returncode: int) -> str:
    """`exit code 2`, or `killed by SIGSEGV`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
