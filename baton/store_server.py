"""The state store of one `baton up`: the server behind a given URL, or an embedded one, supervised like the others.

A given server is only asked whether it answers, a few times with growing waits. The embedded one listens on a Unix socket in
a private folder that outlives its process, so a replacement is found under the same URL. Nothing here reads or writes keys.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from baton.children import ChildSpec
from common.redis_server import server_binary
from common.state.open import open_store

NAME = "store"
PING_WAITS_S = (0.2, 0.5, 1.0, 2.0, 4.0)
EMBEDDED_LOOKS = 200
EMBEDDED_LOOK_S = 0.05
SOCKET_PATH_MAX = 100
"""Unix socket paths end at 107 bytes; a state folder deeper than this gets its socket in a temporary folder instead."""


class StoreFailed(Exception):
    """A line for the user."""


class StoreServer:
    """Where the store is. The caller runs `spec` (if embedded) between `prepare` and `wait`, and calls `clean` in any case."""

    def __init__(self, redis_url: str, run_folder: Path) -> None:
        self.url = redis_url
        self.spec: ChildSpec | None = None
        self._run_folder = run_folder
        self._temporary: Path | None = None

    def prepare(self, stop_stage: int) -> None:
        """Chooses the place of an embedded server; nothing to do for a given URL. Raises StoreFailed when there is none."""
        if self.url:
            return
        try:
            binary = server_binary()
        except RuntimeError as error:
            raise StoreFailed(str(error)) from error
        folder = self._run_folder
        if len(str(folder / "store.sock")) > SOCKET_PATH_MAX:
            folder = self._temporary = Path(tempfile.mkdtemp(prefix="baton-store-"))
        self.url = f"unix://{folder}/store.sock"
        self.spec = ChildSpec(NAME, tuple(embedded_command(binary, folder)), {}, stop_stage)

    async def wait(self) -> None:
        """Returns when the store answers. Raises StoreFailed."""
        waits = (EMBEDDED_LOOK_S,) * EMBEDDED_LOOKS if self.spec is not None else (0.0, *PING_WAITS_S)
        try:
            store = open_store(self.url, "ping")
        except ValueError as error:
            raise StoreFailed(str(error)) from error
        await store.start()
        try:
            for wait_s in waits:
                await asyncio.sleep(wait_s)
                if await store.ping():
                    return
        finally:
            await store.close()
        which = "embedded store" if self.spec is not None else "store given by --redis-url or REDIS_URL"
        raise StoreFailed(f"the {which} did not answer within {sum(waits):.0f} s")

    def describe(self) -> str:
        return "embedded server" if self.spec is not None else "the given server answers"

    def clean(self) -> None:
        """Removes the temporary folder if there is one. Idempotent."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None


def embedded_command(binary: Path, folder: Path, memory_bytes_max: int = 256 << 20) -> list[str]:
    """The server on a Unix socket in `folder`: nothing on disk, no TCP port, bounded memory that fails rather than forgets."""
    flags = {
        "--port": "0",
        "--unixsocket": str(folder / "store.sock"),
        "--unixsocketperm": "700",
        "--dir": str(folder),
        "--save": "",
        "--appendonly": "no",
        "--maxmemory": str(memory_bytes_max),
        "--maxmemory-policy": "noeviction",
        "--daemonize": "no",
    }
    return [str(binary), *[part for pair in flags.items() for part in pair]]
