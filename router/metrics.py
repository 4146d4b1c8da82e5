"""The Prometheus metrics of a router process, every name in this file; the workers' are in `common/metrics.py`.

Names carry the prefix `baton_` and, where users of vLLM dashboards know one, its suffix. Counters satisfy started = finished + cancelled
+ failed; histograms are seconds, observed once per request and never per token.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from common.metrics import SECONDS

LONG_SECONDS = (*SECONDS, 120.0, 300.0, 600.0)


class RouterMetrics:
    """One object per router with a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests_running = Gauge("baton_num_requests_running", "Requests being served", registry=registry)
        self.requests_started = Counter("baton_requests_started", "Requests that got a permit", ["endpoint"], registry=registry)
        self.requests_ended = Counter(
            "baton_requests_ended", "Requests that ended: stop, length, cancelled, failed", ["outcome", "kind"], registry=registry
        )
        self.refusals = Counter(
            "baton_requests_refused", "Requests refused before they got a permit, by error kind", ["kind"], registry=registry
        )
        self.prompt_tokens = Counter("baton_prompt_tokens", "Prompt tokens of requests that ended", registry=registry)
        self.cached_tokens = Counter("baton_prompt_tokens_cached", "Prompt tokens found in a prefix cache", registry=registry)
        self.generation_tokens = Counter("baton_generation_tokens", "Completion tokens of requests that ended", registry=registry)
        self.ttft_s = Histogram(
            "baton_time_to_first_token_seconds", "Request received to first token out", buckets=LONG_SECONDS, registry=registry
        )
        self.tpot_s = Histogram(
            "baton_time_per_output_token_seconds", "Mean time between tokens after the first", buckets=SECONDS, registry=registry
        )
        self.e2e_s = Histogram(
            "baton_e2e_request_latency_seconds", "Request received to its end", buckets=LONG_SECONDS, registry=registry
        )
        self.stage_s = Histogram(
            "baton_request_stage_seconds", "Stages up to the first token out", ["stage"], buckets=SECONDS, registry=registry
        )
        self.placements = Counter(
            "baton_placements", "Placements by mode, and why decode alone", ["mode", "because"], registry=registry
        )
        self.attempt_failures = Counter(
            "baton_attempt_failures", "Attempts that failed, by error kind and leg", ["kind", "leg"], registry=registry
        )
        self.retries = Counter("baton_request_retries", "Attempts made again, by error kind", ["kind"], registry=registry)
        self.retries_delayed = Counter("baton_request_retries_delayed", "Retries that had to wait for a slot", registry=registry)
        self.tokens_duplicate = Counter("baton_tokens_duplicate", "Tokens that arrived twice and were dropped", registry=registry)
        self.slow_clients = Counter(
            "baton_slow_clients", "Requests aborted because their client did not take its text", registry=registry
        )
        self.events_dropped = Counter(
            "baton_worker_events_dropped", "Worker events nobody waits for, by reason", ["reason"], registry=registry
        )
        self.workers_usable = Gauge("baton_workers_usable", "Workers that are ready and connected", ["role"], registry=registry)
        self.workers_refused = Counter("baton_workers_refused", "Workers refused, by reason", ["reason"], registry=registry)
        self.store_errors = Counter("baton_store_errors", "Store operations that failed", ["operation"], registry=registry)
        self.journal_dropped = Counter(
            "baton_journal_entries_dropped", "Journal entries that were not written", registry=registry
        )

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)
