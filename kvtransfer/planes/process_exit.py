"""How a worker process ends: with its exit code, even where RDMA libraries of the system crash in their destructors.

When the UCX binding was loaded on a host with RDMA providers, two copies of a netlink library are in the process and one
crashes at exit (SIGSEGV, exit code 139; the data is not affected). Such a process must leave without destructors.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from kvtransfer.planes.ucx import BINDINGS


def exit_process(code: int) -> NoReturn:
    """The last statement of a service: flushes logs and streams, then ends the process. Raises SystemExit where that is
    safe; else ends at once, without `atexit` handlers, so the caller has closed everything it owns before."""
    if not exit_would_crash():
        sys.exit(code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_would_crash(drivers: Path = Path("/etc/libibverbs.d"), maps: Path = Path("/proc/self/maps")) -> bool:
    """Whether the UCX binding is loaded together with the system's RDMA providers (installed, or already mapped)."""
    if not any(name in sys.modules for name in BINDINGS):
        return False
    return (drivers.is_dir() and any(drivers.iterdir())) or "-rdmav" in maps.read_text()
