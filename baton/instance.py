"""The state folder of one running `baton up`: who runs, where it listens, its logs and its sockets.

A lock on a file decides whether an instance is alive, never the pid in the description, so a crashed one is never mistaken for a
running one. The folder is private (0700); logs of the last run stay in it, everything else goes when the instance ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

NAME_PATTERN = re.compile(r"^[A-Za-z0-9_.-]{1,64}$")


class InstanceError(Exception):
    """A line for the user: the instance cannot be started, found or read."""


@dataclass(frozen=True, slots=True)
class Description:
    """What `down`, `ps` and `chat` need to know of a running instance; holds no secret."""

    pid: int
    url: str
    redis_url: str
    cluster: str
    model: str
    started_wall_s: float


def state_home() -> Path:
    """`$XDG_STATE_HOME/baton`, by default `~/.local/state/baton`."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "baton"


class Instance:
    """One instance by name. `acquire` before starting anything, `release` after everything has ended."""

    def __init__(self, name: str, home: Path | None = None) -> None:
        if not NAME_PATTERN.match(name) or name in (".", ".."):
            raise InstanceError(f"instance name {name!r}: 1 to 64 letters, digits, '_', '.' or '-' are allowed")
        self.name = name
        self.folder = (home or state_home()) / name
        self.log_folder = self.folder / "logs"
        self.run_folder = self.folder / "run"
        self._lock: IO[str] | None = None

    @property
    def _description_path(self) -> Path:
        return self.folder / "instance.json"

    def acquire(self) -> None:
        """Takes the lock, clears what a killed predecessor left, and makes the folders.

        Raises InstanceError when another `baton up` holds the lock.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        lock = (self.folder / "lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            running = self.read()
            where = f" at {running.url} (pid {running.pid})" if running else ""
            raise InstanceError(
                f"instance {self.name!r} already runs{where}: stop it with `baton down`, or choose another --instance"
            ) from error
        self._lock = lock
        self._clear()
        shutil.rmtree(self.log_folder, ignore_errors=True)
        for folder in (self.log_folder, self.run_folder):
            folder.mkdir(mode=0o700)

    def release(self) -> None:
        """Removes the description and the sockets, keeps the logs, gives the lock back. Idempotent."""
        if self._lock is None:
            return
        self._clear()
        self._lock.close()
        self._lock = None

    def _clear(self) -> None:
        self._description_path.unlink(missing_ok=True)
        shutil.rmtree(self.run_folder, ignore_errors=True)

    def describe(self, description: Description) -> None:
        """Publishes the description for other commands, in one step."""
        draft = self.folder / "instance.json.new"
        draft.write_text(json.dumps(asdict(description)))
        draft.replace(self._description_path)

    def read(self) -> Description | None:
        """The description as written, whether or not the instance is alive. None if there is none that can be read."""
        try:
            return Description(**json.loads(self._description_path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def is_running(self) -> bool:
        """Whether some `baton up` holds the lock."""
        try:
            with (self.folder / "lock").open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


def find_running(name: str, home: Path | None = None) -> Description:
    """The description of a running instance. Raises InstanceError with what to do."""
    instance = Instance(name, home)
    description = instance.read()
    if not instance.is_running() or description is None:
        raise InstanceError(f"no running instance {name!r}: start one with `baton up`, or name an address yourself")
    return description
