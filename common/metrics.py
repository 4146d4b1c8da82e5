"""The Prometheus metrics of a worker process, every name in this file. A process has one object with a registry of its own.

The router's metrics have the same form in `router/metrics.py`. Counters count what happened; every drop, refusal and expiry has one.
Buckets are seconds and reach from a millisecond to a minute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from common.types import BlockCensus, EngineCounts, HandoffTimeline, WorkerLoad

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class _Refresher(Collector):
    """Collects nothing itself: it is where a scrape of the registry begins."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        self._refresh = refresh

    def collect(self) -> Iterator[Metric]:
        self._refresh()
        yield from ()


class WorkerMetrics:
    """`update` sets the gauges from snapshots at scrape time; the methods count events as they happen."""

    def __init__(self, *, role: str, worker_id: str, model: str) -> None:
        self.registry = registry = CollectorRegistry()
        self._refresh: Callable[[], None] = lambda: None
        registry.register(_Refresher(lambda: self._refresh()))  # first: collectors are read in the order they registered
        ProcessCollector(registry=registry)
        labels = ["role", "worker_id", "model"]
        values = (role, worker_id, model)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry).labels(*values)

        self._running = gauge("baton_sequences_running", "Sequences in the running batch")
        self._waiting = gauge("baton_sequences_waiting", "Sequences that wait for a slot")
        self._blocks = Gauge("baton_kv_blocks", "KV blocks by state", [*labels, "state"], registry=registry)
        self._handoffs = gauge("baton_handoffs_open", "Handoffs under way")

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labels, registry=registry).labels(*values)

        self._engine = {
            "num_steps": counter("baton_engine_steps", "Steps that the engine ran"),
            "num_prompt_tokens": counter("baton_engine_prompt_tokens", "Tokens computed in prompt chunks"),
            "num_decode_tokens": counter("baton_engine_decode_tokens", "Tokens computed one per sequence and step"),
            "num_prefix_hit_tokens": counter("baton_engine_prefix_hit_tokens", "Tokens whose KV the prefix cache had"),
            "num_preemptions": counter("baton_preemptions", "Sequences preempted"),
        }
        self._counted = dict.fromkeys(self._engine, 0)
        self._step_s = Histogram(
            "baton_engine_step_seconds",
            "Time of one engine step, from scheduling to its events",
            buckets=SECONDS,
            registry=registry,
        )
        self._attempts = Counter(
            "baton_attempts", "Attempts that ended, by reason and error kind", ["reason", "kind"], registry=registry
        )
        self._protocol_errors = Counter(
            "baton_protocol_errors", "Messages that made no sense, by place", ["place"], registry=registry
        )
        self._fabric = Counter("baton_fabric", "Counts of the KV fabric, by name", ["count"], registry=registry)
        self._store_errors = Counter("baton_store_errors", "Store operations that failed", registry=registry)
        self._unauthenticated = Counter(
            "baton_calls_unauthenticated", "gRPC calls without the cluster's proof", registry=registry
        )
        self._handoff_bytes = Counter("baton_handoff_bytes", "KV bytes received", ["transport"], registry=registry)
        self._handoff_frames = Counter("baton_handoff_frames", "Frames received", ["transport"], registry=registry)
        self._transfer_s = Histogram(
            "baton_handoff_transfer_seconds", "Data plane time of one handoff", buckets=SECONDS, registry=registry
        )
        self._scatter_s = Histogram(
            "baton_handoff_scatter_seconds", "Copy and verify time of one handoff", buckets=SECONDS, registry=registry
        )
        self._handover_s = Histogram(
            "baton_handoff_handover_seconds",
            "From the closing announcement to the first decode step",
            buckets=SECONDS,
            registry=registry,
        )
        self._values = values
        self._update_lock = threading.Lock()

    def update(self, load: WorkerLoad, census: BlockCensus, counts: EngineCounts) -> None:
        """`counts` since the process started. May be called from several scraping threads at once."""
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._handoffs.set(load.num_handoffs)
        with self._update_lock:
            for name, counter in self._engine.items():
                increase = getattr(counts, name) - self._counted[name]
                if increase > 0:  # else another scrape took a later snapshot and was faster
                    counter.inc(increase)
                    self._counted[name] += increase
        for state, count in (("free", census.free), ("cached", census.cached), ("held", census.held)):
            self._blocks.labels(*self._values, state).set(count)

    def step_ran(self, seconds: float) -> None:
        """Called on the engine thread, once per step."""
        self._step_s.observe(seconds)

    def attempt_ended(self, reason: str, kind: str) -> None:
        self._attempts.labels(reason, kind).inc()

    def protocol_error(self, place: str) -> None:
        self._protocol_errors.labels(place).inc()

    def store_error(self) -> None:
        self._store_errors.inc()

    def unauthenticated(self) -> None:
        self._unauthenticated.inc()

    @property
    def fabric_count(self) -> Callable[[str, float], None]:
        """The seam that the KV fabric counts through."""
        return lambda name, amount: self._fabric.labels(name).inc(amount)

    def handoff_received(self, timeline: HandoffTimeline) -> None:
        self._handoff_bytes.labels(timeline.transport).inc(timeline.num_bytes)
        self._handoff_frames.labels(timeline.transport).inc(timeline.num_frames)
        self._transfer_s.observe(timeline.transfer_s)
        self._scatter_s.observe(timeline.scatter_s)
        if timeline.last_announced_s and timeline.first_decode_s:
            self._handover_s.observe(timeline.first_decode_s - timeline.last_announced_s)

    def on_scrape(self, refresh: Callable[[], None]) -> None:
        """Calls `refresh` before each scrape of the registry, by whichever server, so that gauges show the moment.

        It runs on the scraping thread and must be safe there.
        """
        self._refresh = refresh

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)
