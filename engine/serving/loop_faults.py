"""Errors that end in the event loop's exception handler: ours stop the process, the libraries' are logged.

Timers, done-callbacks and released handoffs run as callbacks of the loop, where an exception reaches nobody; what a worker holds
is not known after that. It must not know what the callbacks do. A library's own noise (a connection that breaks inside grpc)
passes through no code of ours and must not cost the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

from common import log

LOG = log.get_logger("worker.loop")

OUR_PACKAGES = frozenset({"common", "decode_service", "engine", "kernels", "kvtransfer", "prefill_service"})


def watch_loop(loop: asyncio.AbstractEventLoop, on_fault: Callable[[BaseException], None]) -> None:
    """Installs the handler. `on_fault` gets every unhandled exception that passed through our code."""

    def on_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and passed_our_code(error.__traceback__):
            on_fault(error)
        else:
            LOG.error("event_loop_error", message=context.get("message", ""), error=repr(error))

    loop.set_exception_handler(on_error)


def passed_our_code(traceback: TracebackType | None) -> bool:
    """Whether any frame of the traceback belongs to a module of ours."""
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] in OUR_PACKAGES:
            return True
        traceback = traceback.tb_next
    return False
