"""How a worker process ends: with its exit code and all it has said, and without tearing its interpreter down.

A worker has closed what it owns by then. What is left is the teardown of libraries, which nobody needs and which does harm: torch
and what it imports take about a second of a core to destroy (several seconds where a whole fleet stops at once, while its memory
stays taken), a thread that never returns would be joined for ever, and where the system's RDMA providers are installed beside
the UCX binding, two copies of a netlink library are in the process and one crashes in its destructor (exit code 139).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import NoReturn


def exit_process(code: int) -> NoReturn:
    """The last statement of a service: flushes logs and streams, then ends the process at once.

    Runs no `atexit` handler, no finalizer and joins no thread, so the caller has closed everything it owns before. Never raises:
    a log whose reader is gone does not change the exit code.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # gone, closed, or never there
            stream.flush()
    os._exit(code)
