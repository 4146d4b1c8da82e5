"""Processes of a server: what they use, and that they stop and go on together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from bench.process_tree import CpuReading, ProcessTree, TreeError, cpu_shares

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"], stdin=subprocess.PIPE)
sys.stdin.read()
child.communicate()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        yield process
        ProcessTree([process.pid]).resume()
        process.communicate()


def states(tree: ProcessTree) -> set[str]:
    return {process.status() for process in tree.processes()}


def until(tree: ProcessTree, wanted: set[str]) -> None:
    deadline = time.monotonic() + 10
    while not states(tree) <= wanted:
        assert time.monotonic() < deadline, states(tree)
        time.sleep(0.005)


def test_a_tree_stops_and_goes_on_as_a_whole(parent: subprocess.Popen[bytes]) -> None:
    tree = ProcessTree([parent.pid])
    tree.check()
    assert len(tree.processes()) == 2
    tree.pause()
    until(tree, {psutil.STATUS_STOPPED})
    tree.resume()
    until(tree, {psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING})


def test_memory_is_summed_over_the_tree(parent: subprocess.Popen[bytes]) -> None:
    memory = ProcessTree([parent.pid]).memory()
    assert memory["processes"] == 2
    assert 0 < memory["pss_mib"] <= memory["rss_mib"]


def test_idle_cpu_is_that_of_the_busiest_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            idle = ProcessTree([spinning.pid]).idle_cpu(0.5)
        finally:
            spinning.kill()
    assert 0.02 < idle["busiest"] <= 1.1
    assert idle["total"] == idle["busiest"]
    assert len(idle["processes"]) == 1


def test_a_process_that_is_gone_and_our_own_are_refused() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    with pytest.raises(TreeError, match="no process"):
        ProcessTree([ended.pid]).check()
    with pytest.raises(TreeError, match="runs below"):
        ProcessTree([os.getppid()]).check()


def test_foreign_cpu_is_what_neither_server_nor_client_used() -> None:
    before, after = CpuReading(0.0, 100.0, 1.0, 10.0), CpuReading(10.0, 112.0, 2.0, 17.0)
    shares = cpu_shares(before, after, client_cpu_s=1.0, num_cpus=2)
    assert shares == {"server_cpu_share": 0.35, "client_cpu_share": 0.05, "foreign_cpu_share": 0.2, "steal_cpu_share": 0.05}
    with pytest.raises(ValueError):
        cpu_shares(before, before, 0.0, 2)
