"""Puts the router's parts together and owns their tasks: fleet polling, journal writing, worker connections, requests.

The HTTP server is not its business; `app` is an ASGI application. States: built → started → draining → closed, each entered once.
"""

from __future__ import annotations

import asyncio
from random import Random

from common.api_keys import KeyRing
from common.clock import Clock
from common.errors import Draining
from common.ids import new_router_id
from common.lifecycle import Lifecycle
from common.log import EventLogger
from common.state.store import StateStore
from common.types import WorkerInfo
from router.admission import Admission
from router.app import AppSettings, RouterApp
from router.call import OrchestratorSettings
from router.clients import ClientSettings, WorkerClient, WorkerPool
from router.fleet import Fleet
from router.journal import Journal
from router.metrics import RouterMetrics
from router.orchestrator import Orchestrator
from router.placement import PlacementPolicy
from router.settings import RouterSettings
from router.tokenizer import ModelTokenizer
from router.validation import Validator

JOURNAL_ENTRIES_MAX = 10_000
JOURNAL_FLUSH_S = 1.0


class Router:
    """Everything of one router process behind its HTTP server."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        tokenizer: ModelTokenizer,
        store: StateStore,
        clock: Clock,
        metrics: RouterMetrics,
        log: EventLogger,
        version: str,
        keys: KeyRing | None = None,
        client_settings: ClientSettings | None = None,
    ) -> None:
        self.id = new_router_id()
        self._settings = settings
        self._tokenizer = tokenizer
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._version = version
        self._keys = keys
        self._client_settings = client_settings or ClientSettings()
        self._random = Random()
        self._tasks: list[asyncio.Task[None]] = []
        self.admission = Admission(settings.requests_max)
        self.pool = WorkerPool(self._make_client)
        self.fleet = Fleet(
            store=store,
            pool=self.pool,
            model=settings.model_name,
            refresh_s=settings.fleet_refresh_s,
            clock=clock,
            metrics=metrics,
            log=log,
        )
        self.journal = Journal(
            store, clock, ttl_s=settings.journal_ttl_s, entries_max=JOURNAL_ENTRIES_MAX, on_dropped=metrics.journal_dropped.inc
        )
        self.orchestrator = Orchestrator(
            fleet=self.fleet,
            pool=self.pool,
            store=store,
            journal=self.journal,
            tokenizer=tokenizer,
            policy=PlacementPolicy(settings.local_prompt_tokens_max, settings.local_prefill_tokens_max),
            settings=OrchestratorSettings(
                request_timeout_s=settings.request_timeout_s,
                worker_wait_s=settings.worker_wait_s,
                resume_wait_s=settings.resume_wait_s,
                output_chars_max=settings.output_chars_max,
                retries_concurrent_max=settings.retries_concurrent_max,
            ),
            router_id=self.id,
            clock=clock,
            metrics=metrics,
            log=log,
        )
        app_settings = AppSettings(
            model_name=settings.model_name,
            version=version,
            body_bytes_max=settings.body_bytes_max,
            body_timeout_s=settings.body_timeout_s,
            sequence_tokens_max=settings.sequence_tokens_max or None,
            request_timeout_s=settings.request_timeout_s,
            sse_keep_alive_s=settings.sse_keep_alive_s,
            metrics_open=settings.metrics_open,
            cache_salt_secret=settings.secret_bytes if settings.prefix_cache_per_key else None,
        )
        self.app = RouterApp(
            settings=app_settings,
            validator=Validator(model_name=settings.model_name, tokenizer=tokenizer),
            tokenizer=tokenizer,
            admission=self.admission,
            orchestrator=self.orchestrator,
            fleet=self.fleet,
            clock=clock,
            metrics=metrics,
            keys=keys,
        )

    @property
    def num_api_keys(self) -> int:
        """0: everyone may call."""
        return 0 if self._keys is None else len(self._keys)

    async def start(self) -> None:
        """Takes a first look at the fleet and starts the background tasks. A store that is away delays nothing."""
        await self.fleet.refresh()
        self._tasks = [
            asyncio.create_task(self.fleet.run(), name="fleet"),
            asyncio.create_task(self.journal.run(), name="journal"),
        ]

    async def background_failed(self) -> BaseException | None:
        """Returns when a background task ended by itself, which none may do: the process should stop."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        return next((task.exception() for task in done if not task.cancelled()), None)

    async def drain(self, lifecycle: Lifecycle, grace_s: float) -> None:
        """Refuses new requests and waits for the running ones; those left after the grace, or at a second signal, are aborted."""
        self.admission.is_draining = True
        if not await lifecycle.wait_drained(self.orchestrator.idle, grace_s):
            self._log.warn("drain_grace_over", requests=self.orchestrator.num_active, grace_s=grace_s)
            self.orchestrator.cancel_all(Draining("the router is shutting down"))
            await self.orchestrator.close()

    async def close(self) -> None:
        """Aborts what still runs, writes the journal's rest, closes all connections. Idempotent."""
        self.admission.is_draining = True
        await self.orchestrator.close()
        if self._tasks:
            await self.journal.flush(JOURNAL_FLUSH_S)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.pool.close()
        self._tokenizer.close()

    def _make_client(self, info: WorkerInfo) -> WorkerClient:
        return WorkerClient(
            info,
            router_id=self.id,
            version=self._version,
            cluster_secret=self._settings.secret_bytes,
            settings=self._client_settings,
            random=self._random,
            log=self._log,
            on_change=self.fleet.notify,
            on_dropped=lambda reason: self._metrics.events_dropped.labels(reason=reason).inc(),
        )
