"""The sides of `bench.pd`: our fleet in one of its topologies, started and stopped for each turn, and peers that run already.

Our fleet is a `baton up` as a user would start it, in a state folder of its own, and dies with this process. A peer is a URL;
with its process ids it is stopped (SIGSTOP) between turns, so that an idle loop of its own disturbs nobody. Core numbers are the
machine's; times are seconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from baton.children import die_with_parent, tail
from baton.instance import find_running
from baton.subprocess_probe import child_environment
from bench.process_tree import ProcessTree

INSTANCE = "bench"
STOP_TIMEOUT_S = 60.0
LOOK_S = 0.05


class ServerFailed(Exception):
    """A server did not start, or does not answer; a line for the user."""


@dataclass(frozen=True, slots=True)
class Active:
    """A server whose turn it is. `ready_s`: from its start to its readiness; None where we did not start it."""

    url: str
    tree: ProcessTree
    ready_s: float | None


def topologies(cores: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Our sides by name, as flags of `baton up`, on the same two cores. Raises ValueError for another number of cores."""
    if len(set(cores)) != 2:
        raise ValueError(f"cores {list(cores)}: the topologies are compared on two different cores")
    first, second = cores
    both = f"{first},{second}"
    return {
        "pd": (
            *("--prefill", "1", "--decode", "1", "--threads", "1"),
            *("--cpus-prefill", str(first), "--cpus-decode", str(second)),
        ),
        "aggregated": ("--prefill", "0", "--decode", "1", "--threads", "2", "--cpus-decode", both),
        "replicas": ("--prefill", "0", "--decode", "2", "--threads", "1", "--cpus-decode", f"{first};{second}"),
    }


@dataclass(frozen=True, slots=True)
class OurFleet:
    """How to start one of our sides. `up_flags` come last, so they win over the topology's."""

    name: str
    topology: tuple[str, ...]
    model_folder: Path
    model: str
    dtype: str = "bfloat16"
    up_flags: tuple[str, ...] = ()
    ready_timeout_s: float = 180.0

    @property
    def has_handover(self) -> bool:
        return self.topology[self.topology.index("--prefill") + 1] != "0"

    def argv(self, ready_fd: int) -> list[str]:
        """`baton up` on a free port with an embedded store. No self-check: the readiness is measured, the warm-up proves the path."""
        flags = {
            "--instance": INSTANCE,
            "--model": str(self.model_folder),
            "--served-model-name": self.model,
            "--port": "0",
            "--redis-url": "",
            "--dtype": self.dtype,
            "--ready-timeout": f"{self.ready_timeout_s:g}",
            "--ready-fd": str(ready_fd),
        }
        pairs = [part for pair in flags.items() for part in pair]
        return [sys.executable, "-m", "baton.main", "up", "--no-self-check", *pairs, *self.topology, *self.up_flags]

    @contextlib.contextmanager
    def turn(self) -> Iterator[Active]:
        """Starts the fleet, and stops it again whatever happens. Raises ServerFailed with the end of its output."""
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as state_home:
            log_path = Path(state_home) / "up.log"
            read_fd, write_fd = os.pipe()
            started_s = time.monotonic()
            with open(read_fd, "rb", buffering=0) as ready, log_path.open("wb") as log:
                try:
                    process = subprocess.Popen(
                        self.argv(write_fd),
                        env={**os.environ, **child_environment(), "XDG_STATE_HOME": state_home},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        pass_fds=(write_fd,),
                        process_group=0,
                        preexec_fn=die_with_parent(os.getpid()),
                    )
                finally:
                    os.close(write_fd)
                try:
                    if not select.select([ready], [], [], self.ready_timeout_s + STOP_TIMEOUT_S)[0] or not ready.read(64):
                        raise ServerFailed("\n".join([f"{self.name} did not become ready:", *tail(log_path)]))
                    ready_s = time.monotonic() - started_s
                    url = find_running(INSTANCE, Path(state_home) / "baton").url
                    yield Active(url, ProcessTree([process.pid]), ready_s)
                finally:
                    _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """An ordered stop, and a kill if that takes too long: the children die with `baton up`, the kernel sees to it."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that somebody else started. Without process ids it keeps running between turns and has no memory in the report."""

    name: str
    url: str
    pids: tuple[int, ...] = ()
    ready_s: float | None = None
    answer_timeout_s: float = 60.0

    @property
    def has_handover(self) -> bool:
        return False

    @property
    def tree(self) -> ProcessTree:
        return ProcessTree(self.pids)

    def check(self) -> None:
        """Raises ServerFailed when it does not answer now, TreeError when its processes cannot be used."""
        self.tree.check()
        self._wait_answer()

    @contextlib.contextmanager
    def turn(self) -> Iterator[Active]:
        """Lets it run and waits for its answer; stops it again afterwards. Raises ServerFailed."""
        self.tree.resume()
        try:
            self._wait_answer()
            yield Active(self.url, self.tree, self.ready_s)
        finally:
            self.tree.pause()

    def _wait_answer(self) -> None:
        """Any answer of its HTTP server counts; the warm-up shows whether it can do its work."""
        deadline = time.monotonic() + self.answer_timeout_s
        while True:
            try:
                httpx.get(f"{self.url}/v1/models", timeout=5.0, trust_env=False)
                return
            except httpx.HTTPError as error:
                if time.monotonic() > deadline:
                    reason = str(error) or type(error).__name__
                    raise ServerFailed(
                        f"{self.name} at {self.url} does not answer within {self.answer_timeout_s:g} s: {reason}"
                    ) from error
            time.sleep(LOOK_S)


Side = OurFleet | Peer


@contextlib.contextmanager
def paused(peers: Sequence[Peer]) -> Iterator[None]:
    """All peers stopped between turns, and all running again at the end, whatever happens."""
    try:
        for peer in peers:
            peer.tree.pause()
        yield
    finally:
        for peer in peers:
            peer.tree.resume()
