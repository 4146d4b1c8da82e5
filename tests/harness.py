"""A real fleet for tests: embedded store, router and workers as processes, torn down with a leak check.

Everything is real (gRPC, the KV fabric, the small model); only the sizes are small. Used by integration, chaos and e2e
tests. A process that dies during start-up fails the test with the tail of its log.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx
import pytest

from common.redis_server import EmbeddedRedis
from common.state.open import open_store
from common.types import BlockCensus, WorkerInfo

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def demo_model() -> Path:
    """The small model as a Hugging Face folder (fetched and converted on first use); skips visibly where it cannot be had."""
    if override := os.environ.get("BATON_TEST_MODEL"):
        return Path(override)
    result = subprocess.run(
        [sys.executable, "-m", "engine.model_folder", "smollm2-135m"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if result.returncode != 0:
        pytest.skip(f"the demo model cannot be had here: {result.stderr.strip()[-300:]}")
    return Path(result.stdout.strip().splitlines()[-1])


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self, num_bytes: int = 3000) -> str:
        return self.log.read_text(errors="replace")[-num_bytes:]


@dataclass(slots=True)
class Fleet:
    """One cluster. `prefill` 0 makes it an aggregated server: everything runs on decode."""

    model: Path
    redis_url: str
    prefill: int = 1
    decode: int = 1
    dtype: str = "float32"
    transport: str = "ucx"
    block_size: int = 16
    num_blocks: int = 512
    local_prompt_tokens_max: int = 0
    worker_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    cluster: str = field(default_factory=lambda: f"test-{secrets.token_hex(4)}")
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    children: dict[str, Child] = field(default_factory=dict)
    port: int = 0
    _folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # processes ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Fleet:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-test-")
        try:
            self.start_router()
            for index in range(self.prefill):
                self.start_worker("prefill", f"prefill-{index}")
            for index in range(self.decode):
                self.start_worker("decode", f"decode-{index}")
            self.wait_ready(self.prefill, self.decode)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            for child in self.children.values():
                print(f"--- {child.name}\n{child.tail()}", file=sys.stderr)
        self.stop()

    def _spawn(self, name: str, arguments: list[str]) -> Child:
        assert self._folder is not None
        log_path = Path(self._folder.name) / f"{name}-{secrets.token_hex(3)}.log"
        environment = os.environ | {"BATON_CLUSTER_SECRET": self.secret, "PYTHONUNBUFFERED": "1"}
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        child = self.children[name] = Child(name, process, log_path)
        return child

    def start_router(self, name: str = "router") -> Child:
        self.port = self.port or free_port()
        return self._spawn(
            name,
            ["router.main", "--model", str(self.model), "--port", str(self.port), "--redis-url", self.redis_url, "--cluster", self.cluster,
             "--served-model-name", "smollm2-135m", "--local-prompt-tokens-max", str(self.local_prompt_tokens_max), *self.router_flags],
        )  # fmt: skip

    def start_worker(self, role: str, name: str, *flags: str) -> Child:
        defaults = {
            "--model": str(self.model), "--served-model-name": "smollm2-135m", "--worker-id": name, "--redis-url": self.redis_url,
            "--cluster": self.cluster, "--dtype": self.dtype, "--transport": self.transport, "--block-size": str(self.block_size),
            "--num-blocks": str(self.num_blocks), "--threads": "1", "--metrics-port": "-1",
        }  # fmt: skip
        given = iter((*self.worker_flags, *flags))
        defaults |= dict(zip(given, given, strict=True))
        return self._spawn(name, [f"{role}_service.main", *[part for pair in defaults.items() for part in pair]])

    def wait_ready(self, prefill: int, decode: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until the router sees that many usable workers. Fails at once if a process has died."""
        deadline = time.monotonic() + timeout_s
        state: object = None
        while time.monotonic() < deadline:
            for child in self.children.values():
                if child.process.poll() is not None:
                    raise AssertionError(f"{child.name} exited with {child.process.returncode}:\n{child.tail()}")
            try:
                reply = httpx.get(f"{self.url}/readyz", timeout=2)
                state = reply.json()
                usable = reply.json()["workers"]
                if usable["prefill"] >= prefill and usable["decode"] >= decode:
                    return
            except (httpx.HTTPError, ValueError) as error:
                state = repr(error)
            time.sleep(0.1)
        tails = "\n".join(f"--- {child.name}\n{child.tail(1500)}" for child in self.children.values())
        raise AssertionError(f"not ready after {timeout_s} s: {state}\n{tails}")

    def kill(self, name: str, sig: signal.Signals = signal.SIGKILL) -> None:
        child = self.children[name]
        child.process.send_signal(sig)
        if sig is not signal.SIGSTOP and sig is not signal.SIGCONT:
            child.process.wait(timeout=60)
            del self.children[name]

    def stop(self) -> dict[str, int]:
        """SIGTERM to all, router first; returns exit codes. Kills what does not end within 30 s and says so."""
        codes: dict[str, int] = {}
        for child in self.children.values():
            if child.process.poll() is None:
                child.process.terminate()
        for name, child in self.children.items():
            try:
                codes[name] = child.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait(timeout=10)
                codes[name] = -9
                print(f"{name} did not end in time:\n{child.tail()}", file=sys.stderr)
        self.children.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        return codes

    # what the store says ------------------------------------------------------------------------------------------

    def workers(self) -> list[WorkerInfo]:
        async def read() -> list[WorkerInfo]:
            store = open_store(self.redis_url, self.cluster)
            await store.start()
            try:
                return await store.list_workers()
            finally:
                await store.close()

        return asyncio.run(read())

    def census(self) -> dict[str, BlockCensus]:
        async def read() -> dict[str, BlockCensus]:
            store = open_store(self.redis_url, self.cluster)
            await store.start()
            try:
                return dict(await store.block_ownership())
            finally:
                await store.close()

        return asyncio.run(read())

    def wait_idle(self, timeout_s: float = 20.0) -> dict[str, BlockCensus]:
        """Until no worker holds a block; fails with the holders if that takes longer."""
        deadline = time.monotonic() + timeout_s
        while True:
            census = self.census()
            if census and all(c.held == 0 for c in census.values()):
                for c in census.values():
                    assert c.free + c.cached == c.total, c
                return census
            if time.monotonic() > deadline:
                raise AssertionError(f"blocks still held after {timeout_s} s: { {w: c.held_by for w, c in census.items()} }")
            time.sleep(0.2)


class Store:
    """One store server for a test session: REDIS_URL if given, else the embedded one."""

    def __init__(self) -> None:
        self._server: EmbeddedRedis | None = None
        self.url = os.environ.get("REDIS_URL", "")
        if not self.url:
            self._server = EmbeddedRedis()
            self._server.start()
            self.url = self._server.url

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
