"""The router's view of the workers: who is registered, who may be used, who is refused and why.

A shell polls the state store and keeps the last view when the store is away or comes back empty; the decision who fits is a pure function.
A worker of another model is refused, and so is one whose KV layout differs from the fleet's; heartbeats and ages are monotonic seconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.clock import Clock
from common.errors import StoreUnavailable
from common.log import EventLogger
from common.state.store import StateStore
from common.types import Role, WorkerInfo, WorkerState
from router.clients import WorkerPool
from router.metrics import RouterMetrics
from router.placement import Candidate, WorkerKey, worker_key

EMPTY_STORE_GRACE_S = 5.0
"""How long connected workers stay in view when the store suddenly knows nobody: it lost its memory, they will publish again."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Outcome of one look at the registry. `refused` maps a worker to (short reason for the metric, words for the log)."""

    workers: tuple[WorkerInfo, ...] = ()
    refused: dict[WorkerKey, tuple[str, str]] = field(default_factory=dict)
    fingerprint: str = ""


def accept(registered: Sequence[WorkerInfo], model: str, fingerprint: str) -> Accepted:
    """Splits the registry into workers to use and workers to refuse. Pure.

    `fingerprint` is the layout in force ("" at first): it stays while any worker of this model has it, otherwise the most
    common one among the workers takes over (decode workers count first, then the lowest), the same at every router.
    """
    refused: dict[WorkerKey, tuple[str, str]] = {}
    ours = []
    for info in registered:
        if info.model != model:
            refused[worker_key(info)] = ("model", f"serves model {info.model!r}, this fleet serves {model!r}")
        else:
            ours.append(info)
    if ours and not any(info.kv_fingerprint == fingerprint for info in ours):
        counts = Counter(info.kv_fingerprint for info in ours)
        decodes = Counter(info.kv_fingerprint for info in ours if info.role is Role.DECODE)
        fingerprint = min(counts, key=lambda f: (-decodes[f], -counts[f], f))
    for info in ours:
        if info.kv_fingerprint != fingerprint:
            layout = f"{info.kv_fingerprint[:16]} (block size {info.block_size}, {info.dtype})"
            words = f"has KV layout {layout}, the fleet has {fingerprint[:16]}"
            refused[worker_key(info)] = ("kv_layout", words)
    return Accepted(tuple(i for i in ours if i.kv_fingerprint == fingerprint), refused, fingerprint)


class Fleet:
    """Polls the registry every `refresh_s`, keeps the worker pool in step, and offers candidates to placement."""

    def __init__(
        self,
        *,
        store: StateStore,
        pool: WorkerPool,
        model: str,
        refresh_s: float,
        clock: Clock,
        metrics: RouterMetrics,
        log: EventLogger,
    ) -> None:
        self._store = store
        self._pool = pool
        self._model = model
        self._refresh_s = refresh_s
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._accepted = Accepted()
        self._emptied_at: float | None = None
        self._changed = asyncio.Event()
        self.is_store_up = False
        self._is_outage_logged = False

    async def run(self) -> None:
        """Refreshes until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._refresh_s)

    async def refresh(self) -> None:
        """One look at the registry; with the store away the last view stays."""
        try:
            registered = await self._store.list_workers()
        except StoreUnavailable as error:
            self._metrics.store_errors.labels(operation="list_workers").inc()
            if not self._is_outage_logged:
                self._log.warn("store_away", error=error.message, workers_kept=len(self._accepted.workers))
            self.is_store_up = False
            self._is_outage_logged = True
            return
        if not self.is_store_up:
            self._log.event("store_up", workers=len(registered))
        self.is_store_up = True
        self._is_outage_logged = False
        if not registered and self._keeps_view_of_emptied_store():
            return
        self._apply(accept(registered, self._model, self._accepted.fingerprint))

    def candidates(self, role: Role) -> list[Candidate]:
        """Workers of a role that are ready and connected, with what this router has on them."""
        found = []
        for info in self._accepted.workers:
            client = self._pool.get(worker_key(info))
            if info.role is role and info.state is WorkerState.READY and client is not None and client.is_connected:
                found.append(Candidate(info, client.num_requests, client.num_queued_tokens))
        return found

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._accepted.workers

    @property
    def refused(self) -> dict[WorkerKey, tuple[str, str]]:
        return self._accepted.refused

    def sequence_tokens_max(self) -> int | None:
        """The longest prompt + completion some decode worker can hold, or None when none is known."""
        lengths = [info.max_sequence_tokens for info in self._accepted.workers if info.role is Role.DECODE]
        return max(lengths) if lengths else None

    def notify(self) -> None:
        """Wakes everybody who waits for the fleet to change; clients call it when they connect or lose a stream."""
        self._changed.set()
        self._changed = asyncio.Event()
        for role in Role:
            self._metrics.workers_usable.labels(role=role.value).set(len(self.candidates(role)))

    async def changed(self) -> None:
        """Returns at the next change of the view or of a connection."""
        await self._changed.wait()

    def _keeps_view_of_emptied_store(self) -> bool:
        """A store that lost everything at once says nothing about workers whose streams are alive."""
        if not any(client.is_connected for client in self._pool.clients()):
            return False
        now = self._clock.monotonic()
        if self._emptied_at is None:
            self._emptied_at = now
            self._log.warn("store_emptied", workers_kept=len(self._accepted.workers), grace_s=EMPTY_STORE_GRACE_S)
        return now - self._emptied_at < EMPTY_STORE_GRACE_S

    def _apply(self, accepted: Accepted) -> None:
        self._emptied_at = None
        before = self._accepted
        for key, (reason, words) in accepted.refused.items():
            if key not in before.refused:
                self._metrics.workers_refused.labels(reason=reason).inc()
                self._log.error("worker_refused", worker=key[0], incarnation=key[1], reason=reason, detail=words)
        old = {worker_key(i): i.state for i in before.workers}
        new = {worker_key(i): i.state for i in accepted.workers}
        self._accepted = accepted
        self._pool.sync(list(accepted.workers))
        if old != new:
            fields = {"workers": {f"{key[0]}/{key[1]}": state.value for key, state in new.items()}}
            self._log.event("fleet_changed", **fields)
            self.notify()
