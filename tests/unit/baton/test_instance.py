"""The state folder of an instance: who is alive, what is cleared, what stays."""

from __future__ import annotations

import argparse
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from baton import down
from baton.instance import Description, Instance, InstanceError, find_running
from baton.listen import PortTaken, choose_port, reachable_url
from baton.subprocess_probe import PACKAGE_ROOT

HERE = Description(os.getpid(), "http://127.0.0.1:1", "redis://x", "c", "m", 1.0)

HOLDER = """
import os, signal, sys, time
from baton.instance import Description, Instance
from pathlib import Path
instance = Instance("default", Path(sys.argv[1]))
instance.acquire()
instance.describe(Description(os.getpid(), "http://127.0.0.1:1", "redis://x", "c", "m", 1.0))
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("held", flush=True)
time.sleep(600)
"""


def hold(home: Path, manner: str = "polite") -> subprocess.Popen[str]:
    """Another process that holds the instance `default`."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(home), manner], cwd=PACKAGE_ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() == "held"
    holder.stdout.close()
    return holder


def test_the_folder_is_private_and_only_the_logs_stay(tmp_path: Path) -> None:
    instance = Instance("default", tmp_path)
    instance.acquire()
    assert stat.S_IMODE(instance.folder.stat().st_mode) == 0o700
    (instance.run_folder / "redis.sock").touch()
    (instance.log_folder / "router.log").write_text("x")
    instance.describe(HERE)
    assert instance.read() == HERE
    instance.release()
    assert instance.read() is None
    assert not instance.run_folder.exists()
    assert (instance.log_folder / "router.log").exists()
    instance.release()


def test_a_second_one_of_the_same_name_is_refused_with_the_address_of_the_first(tmp_path: Path) -> None:
    first = Instance("default", tmp_path)
    first.acquire()
    first.describe(HERE)
    try:
        with pytest.raises(InstanceError, match="127.0.0.1:1"):
            Instance("default", tmp_path).acquire()
        other = Instance("other", tmp_path)
        other.acquire()
        other.release()
    finally:
        first.release()


def test_what_a_killed_one_left_is_not_taken_for_a_running_one(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    assert find_running("default", tmp_path).pid == holder.pid
    holder.kill()
    holder.wait(timeout=10)
    instance = Instance("default", tmp_path)
    assert instance.read() is not None, "the description is still there"
    assert not instance.is_running()
    with pytest.raises(InstanceError, match="no running instance"):
        find_running("default", tmp_path)
    instance.acquire()
    assert instance.read() is None
    instance.release()


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 65, "ä"])
def test_names_that_are_no_folder_names_are_refused(name: str) -> None:
    with pytest.raises(InstanceError):
        Instance(name)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', json.dumps({"pid": 1, "more": 2})])
def test_a_damaged_description_is_none(tmp_path: Path, text: str) -> None:
    instance = Instance("default", tmp_path)
    instance.folder.mkdir()
    (instance.folder / "instance.json").write_text(text)
    assert instance.read() is None


def test_down_stops_and_waits(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    assert "stopped" in down.stop_instance(Instance("default", tmp_path), timeout_s=20)
    assert holder.wait(timeout=1) == -15


def test_down_kills_what_does_not_stop(tmp_path: Path) -> None:
    holder = hold(tmp_path, "stubborn")
    assert "killed" in down.stop_instance(Instance("default", tmp_path), timeout_s=0.2)
    assert holder.wait(timeout=1) == -9


def test_down_of_nothing_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert down.run(argparse.Namespace(instance="default", timeout=1.0)) == 0
    assert "does not run" in capsys.readouterr().out


def test_a_taken_port_is_said_and_zero_finds_a_free_one() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"127.0.0.1:{port}"):
            choose_port("127.0.0.1", port)
        assert choose_port("127.0.0.1", 0) not in (0, port)


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8"), ("::", "http://[::1]:8"), ("::1", "http://[::1]:8"), ("box", "http://box:8")],
)
def test_the_url_can_be_reached_from_this_machine(host: str, url: str) -> None:
    assert reachable_url(host, 8) == url
