"""The processes of one server, seen through /proc: their memory, their CPU time, and stopping them while it is not their turn.

A tree is one or more root processes and whatever descends from them at the moment of asking; it is read anew each time. Memory is
resident (RSS counts shared pages in every process, PSS divides them), CPU time in seconds of one core.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

MIB = 1 << 20


class TreeError(Exception):
    """A line for the user: these processes cannot be measured or stopped."""


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPU seconds at one moment: of the whole machine (not idle, not stolen), stolen by other guests, and of one tree."""

    at_s: float
    busy_s: float
    steal_s: float
    tree_s: float


class ProcessTree:
    """The processes below some roots."""

    def __init__(self, roots: Sequence[int]) -> None:
        self.roots = tuple(roots)

    def check(self) -> None:
        """Raises TreeError unless every root lives and this process is not below one: it would stop itself."""
        for root in self.roots:
            if not psutil.pid_exists(root):
                raise TreeError(f"no process {root}")
        if any(process.pid == os.getpid() for process in self.processes()):
            raise TreeError(f"this program runs below process {self.roots}: it cannot be stopped between turns")

    def processes(self) -> list[psutil.Process]:
        """Roots first, then their descendants; processes that end meanwhile are left out."""
        found: dict[int, psutil.Process] = {}
        for root in self.roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(root)
                for one in (process, *process.children(recursive=True)):
                    found.setdefault(one.pid, one)
        return list(found.values())

    def memory(self) -> dict[str, Any]:
        """Resident MiB of all processes together."""
        rss = pss = num_processes = 0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                full = process.memory_full_info()
                rss, pss, num_processes = rss + full.rss, pss + full.pss, num_processes + 1
        return {"rss_mib": round(rss / MIB), "pss_mib": round(pss / MIB), "processes": num_processes}

    def cpu_s(self) -> dict[int, float]:
        """CPU seconds of each process so far."""
        seconds: dict[int, float] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                times = process.cpu_times()
                seconds[process.pid] = times.user + times.system
        return seconds

    def idle_cpu(self, seconds: float) -> dict[str, Any]:
        """What the tree uses while nothing is asked of it: cores in all, of the busiest process, and of each that used any."""
        before, started_s = self.cpu_s(), time.monotonic()
        time.sleep(seconds)
        after, elapsed_s = self.cpu_s(), time.monotonic() - started_s
        shares = {pid: (after[pid] - before[pid]) / elapsed_s for pid in after if pid in before}
        names = {process.pid: _label(process) for process in self.processes()}
        used = {f"{names.get(pid, 'ended')} ({pid})": round(share, 4) for pid, share in shares.items() if share > 0}
        return {
            "seconds": round(elapsed_s, 2),
            "total": round(sum(shares.values()), 4),
            "busiest": round(max(shares.values(), default=0.0), 4),
            "processes": used,
        }

    def reading(self) -> CpuReading:
        """A point to measure from; see `cpu_shares`."""
        times = psutil.cpu_times()
        busy_s = times.user + times.nice + times.system + times.irq + times.softirq
        return CpuReading(time.monotonic(), busy_s, times.steal, sum(self.cpu_s().values()))

    def pause(self) -> None:
        """SIGSTOP to all, parents before children, so that none acts on a child's silence. Use `resume` in any case."""
        for process in self.processes():
            self._send(process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to all, children before parents."""
        for process in reversed(self.processes()):
            self._send(process.pid, signal.SIGCONT)

    def _send(self, pid: int, number: signal.Signals) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise TreeError(f"process {pid} belongs to another user: it cannot be stopped between turns") from error


def cpu_shares(before: CpuReading, after: CpuReading, client_cpu_s: float, num_cpus: int) -> dict[str, float]:
    """Shares of all cores between two readings: of the tree, of the load generator, of other programs, and stolen. Pure."""
    cores_s = (after.at_s - before.at_s) * num_cpus
    if cores_s <= 0:
        raise ValueError(f"the readings are {after.at_s - before.at_s:g} s apart")
    tree_s = after.tree_s - before.tree_s
    foreign_s = after.busy_s - before.busy_s - tree_s - client_cpu_s
    parts = {"server": tree_s, "client": client_cpu_s, "foreign": max(0.0, foreign_s), "steal": after.steal_s - before.steal_s}
    return {f"{name}_cpu_share": round(seconds / cores_s, 4) for name, seconds in parts.items()}


def _label(process: psutil.Process) -> str:
    """A worker's id where the command line has one, else the program's or the Python module's name."""
    try:
        words: list[str] = process.cmdline()
        name: str = process.name()
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return "ended"
    for flag in ("--worker-id", "-m"):
        if flag in words[:-1]:
            return words[words.index(flag) + 1]
    return os.path.basename(words[0].split()[0]) if words and words[0].split() else name
