"""Runs a piece of the system in a process of its own and reads what it prints: the command line itself never loads torch or UCX.

Owns the environment children are started with (they must find the same packages as this process, whatever the current folder
holds) and bounded, killable runs of helper processes. Nothing here knows what is asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.children import die_with_parent

PACKAGE_ROOT = Path(__file__).resolve().parent.parent


def child_environment() -> dict[str, str]:
    """What a Python child needs beside our own environment, so that `-m router.main` means our package.

    Safe path: a folder named `common` in the current directory must not shadow ours. A source checkout is put on the path, in
    case it is not installed.
    """
    env = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    if (PACKAGE_ROOT / "pyproject.toml").exists():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", ""))))
    return env


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished helper process. `reason` is the last line of its error output."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def reason(self) -> str:
        lines = [line for line in self.stderr.strip().splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"exit code {self.returncode}"


def run_python(arguments: Sequence[str], timeout_s: float) -> Outcome:
    """Runs this Python with `arguments`, waits at most `timeout_s` seconds. A timeout is an Outcome with code -9."""
    try:
        result = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **child_environment()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(-9, "", f"no answer within {timeout_s:.0f} s")
    return Outcome(result.returncode, result.stdout, result.stderr)


def probe_json(code: str, timeout_s: float) -> Any:
    """Runs Python code whose last line of output is one JSON value and returns it. Raises RuntimeError with the reason."""
    outcome = run_python(["-c", code], timeout_s)
    lines = outcome.stdout.strip().splitlines()
    if outcome.returncode != 0 or not lines:
        raise RuntimeError(outcome.reason)
    try:
        return json.loads(lines[-1])
    except ValueError as error:
        raise RuntimeError(f"unexpected answer {lines[-1][:80]!r}") from error


async def stream_python(arguments: Sequence[str], on_line: Callable[[str], None]) -> Outcome:
    """Runs this Python with `arguments`; each piece of its error output (ended by newline or carriage return) goes to `on_line`.

    Cancelling it kills the process. It also dies with this process.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        env={**os.environ, **child_environment()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
        preexec_fn=die_with_parent(os.getpid()),
    )
    assert process.stdout is not None and process.stderr is not None
    kept: list[str] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            output = tasks.create_task(process.stdout.read())
            tasks.create_task(_read_pieces(process.stderr, kept, on_line))
        returncode = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Outcome(returncode, output.result().decode(errors="replace"), "\n".join(kept))


async def _read_pieces(
    stream: asyncio.StreamReader, kept: list[str], on_line: Callable[[str], None], kept_max: int = 200
) -> None:
    rest = ""
    while data := await stream.read(4096):
        *pieces, rest = (rest + data.decode(errors="replace")).replace("\r", "\n").split("\n")
        for piece in filter(None, (piece.strip() for piece in pieces)):
            kept.append(piece)
            del kept[:-kept_max]
            on_line(piece)
    if rest.strip():
        kept.append(rest.strip())
        on_line(rest.strip())
