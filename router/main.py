"""`python -m router.main`: reads the settings, loads the tokenizer, serves HTTP until told to drain.

Owns the process: signals, the HTTP server, the exit code (0 drained, 1 broken, 2 bad settings or model files, 3 grace over).
A store that is away at the start delays nothing but is logged; everything else is the composition's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Iterator

import jinja2
import uvicorn

from common.api_keys import KeyFileError, KeyRing, load_keys
from common.clock import SystemClock
from common.lifecycle import Lifecycle
from common.log import configure_logging, get_logger
from common.settings import settings_or_exit
from common.state.open import open_store
from common.state.store import StateStore
from common.version import VERSION
from router.composition import Router
from router.metrics import RouterMetrics
from router.settings import RouterSettings
from router.tokenizer import ModelFilesError, ModelTokenizer, load_tokenizer

EXIT_BAD_INPUT = 2
KEEP_ALIVE_S = 75
"""Idle connections: longer than the pools of common clients keep theirs, so that no request meets a closing socket."""
LOG = get_logger("router")


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: the lifecycle owns the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    settings = settings_or_exit(RouterSettings, sys.argv[1:], os.environ, prog="router")
    configure_logging(level=settings.log_level, service="router")
    try:
        tokenizer = load_tokenizer(settings.model)
        keys = load_keys(settings.api_keys_file, settings.api_keys)
        store = open_store(settings.redis_url, settings.cluster)
        listener = _listen(settings.host, settings.port)
    except (ModelFilesError, KeyFileError, jinja2.TemplateSyntaxError, OSError, ValueError) as error:
        print(f"router: {error}", file=sys.stderr)  # noqa: T201 - one clear line for the person who started the process
        raise SystemExit(EXIT_BAD_INPUT) from error
    raise SystemExit(asyncio.run(serve(settings, tokenizer, store, listener, keys)))


async def serve(
    settings: RouterSettings, tokenizer: ModelTokenizer, store: StateStore, listener: socket.socket, keys: KeyRing | None
) -> int:
    """Serves on the listening socket until drained. Returns the exit code."""
    lifecycle = Lifecycle()
    lifecycle.install_signal_handlers()
    await store.start()
    router = Router(
        settings,
        tokenizer=tokenizer,
        store=store,
        clock=SystemClock(),
        metrics=RouterMetrics(),
        log=LOG,
        version=VERSION,
        keys=keys,
    )
    try:
        await router.start()
        server = _Server(
            uvicorn.Config(router.app.asgi, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=KEEP_ALIVE_S)
        )
        await _run(server, router, lifecycle, settings, listener)
    finally:
        await router.close()
        await store.close()
        lifecycle.remove_signal_handlers()
    LOG.event("router_stopped", exit_code=lifecycle.exit_code)
    return lifecycle.exit_code


async def _run(server: _Server, router: Router, lifecycle: Lifecycle, settings: RouterSettings, listener: socket.socket) -> None:
    """Runs the HTTP server beside the watch for signals and broken background tasks."""
    http = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    asked = asyncio.create_task(lifecycle.drain_asked(), name="signals")
    broken = asyncio.create_task(router.background_failed(), name="background")
    host, port = listener.getsockname()[:2]
    lifecycle.ready()
    LOG.event(
        "router_listening", host=host, port=port, model=settings.model_name, router_id=router.id, num_api_keys=router.num_api_keys
    )
    try:
        await asyncio.wait({http, asked, broken}, return_when=asyncio.FIRST_COMPLETED)
        if broken.done() or http.done():
            lifecycle.fail(
                "router_task_ended", task="background" if broken.done() else "http", error=repr(_error_of(broken, http))
            )
        await router.drain(lifecycle, settings.drain_grace_s)
    finally:
        server.should_exit = True
        await asyncio.wait({http}, timeout=5.0)
        for task in (http, asked, broken):
            task.cancel()
        await asyncio.wait({http, asked, broken})


def _error_of(broken: asyncio.Task[BaseException | None], http: asyncio.Task[None]) -> BaseException | None:
    return broken.result() if broken.done() else http.exception()


def _listen(host: str, port: int) -> socket.socket:
    """Bound before the loop starts, so that a port in use is one clear line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(1024)
    return listener


if __name__ == "__main__":
    main()
