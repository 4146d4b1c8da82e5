"""`baton up --detach`: the same `baton up` in a session of its own, and a parent that waits until it serves.

The parent knows readiness by a pipe, and failure by the pipe's end without a word; it shows the background process's output
until then. The instance's lock and description, not this module, let `baton down` find it later.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from baton.instance import Instance, InstanceError, state_home
from baton.subprocess_probe import child_environment

START_MARGIN_S = 900.0
"""Beyond the readiness deadline: the first fetch and conversion of a model may take this long."""
LOOK_S = 0.2


def start_detached(arguments: argparse.Namespace, console: Console) -> int:
    """Exit code 0 when it serves, else that of the background process. Raises InstanceError when the instance runs already."""
    instance = Instance(arguments.instance)
    if instance.is_running():
        raise InstanceError(f"instance {instance.name!r} already runs: stop it with `baton down`")
    state_home().mkdir(mode=0o700, parents=True, exist_ok=True)
    log_path = state_home() / f"{instance.name}.up.log"
    read_fd, write_fd = os.pipe()
    try:
        with log_path.open("wb") as log:
            os.chmod(log_path, 0o600)
            process = subprocess.Popen(
                [sys.executable, "-m", "baton.main", *background_flags(arguments.argv), "--ready-fd", str(write_fd)],
                env={**os.environ, **child_environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(write_fd,),
            )
    finally:
        os.close(write_fd)
    try:
        return _follow(process, read_fd, log_path, console, arguments.ready_timeout + START_MARGIN_S)
    finally:
        os.close(read_fd)


def background_flags(argv: list[str]) -> list[str]:
    """The command line again, without the flag that would detach once more."""
    return [flag for flag in argv if flag != "--detach"]


def _follow(process: subprocess.Popen[bytes], read_fd: int, log_path: Path, console: Console, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    with log_path.open("rb") as log:
        while time.monotonic() < deadline:
            readable, _, _ = select.select([read_fd], [], [], LOOK_S)
            _show(log.read(), console)
            if not readable:
                continue
            if os.read(read_fd, 64):
                _show(log.read(), console)
                console.print(f"running in the background (pid {process.pid}); `baton down` stops it", highlight=False)
                return 0
            returncode = process.wait()
            _show(log.read(), console)
            return returncode or 1
    process.terminate()
    process.wait()
    console.print(f"not ready within {timeout_s:.0f} s, stopped again", style="red", highlight=False)
    return 1


def _show(output: bytes, console: Console) -> None:
    if output:
        console.print(output.decode(errors="replace"), end="", markup=False, highlight=False, soft_wrap=True)
