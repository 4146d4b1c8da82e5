"""Runs one workload against one server and reports what its clients saw.

Uses the load generator of `baton bench`; knows the workloads and a URL, not whose server it is. Every request has a connection of its
own: some servers lose reused ones, and on the loopback a new one costs a fraction of a millisecond for all alike.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx

from baton.bench import BenchOptions, client_cpu_s, closed_loop, open_loop
from baton.bench_arrivals import poisson_arrivals
from baton.bench_stats import RequestRecord, summarize
from bench import handover
from bench.pd_plan import ClosedLoop, OpenLoop, Workload
from bench.pd_prompts import TokenPrompts

WARM_UP = (ClosedLoop("warm-up", 4, 8, 128, 16), ClosedLoop("warm-up long", 1, 1, 1500, 4))


@dataclass(frozen=True, slots=True)
class Target:
    """Where the load goes. `timeout_s` bounds each request."""

    url: str
    model: str
    timeout_s: float


class LoadFailed(Exception):
    """Not one request of a workload was answered; a line for the user."""


async def run_workload(workload: Workload, target: Target, seed: int, prompts: TokenPrompts) -> dict[str, Any]:
    """The report of one run. Failed requests are counted in it. Raises LoadFailed when none was answered."""
    if isinstance(workload, ClosedLoop):
        return await _closed(workload, target, seed, prompts)
    if isinstance(workload, OpenLoop):
        return await _open(workload, target, seed, prompts)
    rows: list[handover.Row] = []
    cpu_before_s = client_cpu_s()
    try:
        with httpx.Client(timeout=target.timeout_s, trust_env=False) as client:
            for prompt in prompts.make(seed, [workload.prompt_tokens] * workload.repeats):
                rows.append(handover.measure(client, target.url, target.model, prompt))
    except (handover.NoHandover, httpx.HTTPError) as error:
        raise LoadFailed(f"{workload.name}: {str(error) or type(error).__name__}") from error
    return {"client_cpu_s": round(client_cpu_s() - cpu_before_s, 3), "errors": {}, **handover.medians(rows), "requests": rows}


def _options(target: Target, seed: int, concurrency: int, requests: int, prompt_tokens: int, output_tokens: int) -> BenchOptions:
    return BenchOptions(
        url=target.url,
        model=target.model,
        endpoint="completions",
        concurrency=concurrency,
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seed=seed,
        timeout_s=target.timeout_s,
    )


def _client(target: Target) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=target.timeout_s, limits=limits, trust_env=False)


async def _closed(workload: ClosedLoop, target: Target, seed: int, prompts: TokenPrompts) -> dict[str, Any]:
    options = _options(target, seed, workload.concurrency, workload.requests, workload.prompt_tokens, workload.output_tokens)
    made = prompts.make(seed, [workload.prompt_tokens] * workload.requests)
    async with _client(target) as client:
        cpu_before_s = client_cpu_s()
        started_s = time.monotonic()
        records = await closed_loop(client, options, made)
        wall_s = time.monotonic() - started_s
    cpu_s = round(client_cpu_s() - cpu_before_s, 3)
    return {"client_cpu_s": cpu_s, **_checked(workload.name, records, wall_s)}


async def _open(workload: OpenLoop, target: Target, seed: int, prompts: TokenPrompts) -> dict[str, Any]:
    arrivals = poisson_arrivals(seed, workload.classes, workload.duration_s)
    if not arrivals:
        raise LoadFailed(f"{workload.name}: not one arrival within {workload.duration_s:g} s; raise the rates or the duration")
    made = prompts.make(seed, [arrival.prompt_tokens for arrival in arrivals])
    options = _options(target, seed, 0, len(arrivals), 0, 0)
    async with _client(target) as client:
        cpu_before_s = client_cpu_s()
        started_s = time.monotonic()
        records = await open_loop(client, options, list(zip(arrivals, made, strict=True)))
        wall_s = time.monotonic() - started_s
    report = {"client_cpu_s": round(client_cpu_s() - cpu_before_s, 3), **_checked(workload.name, records, wall_s)}
    report["send_lag_ms_max"] = round(1e3 * max(record.sent_s - record.start_s for record in records), 3)
    classes = {one.label: [record for record in records if record.label == one.label] for one in workload.classes}
    return {**report, "classes": {label: summarize(of_class, wall_s) for label, of_class in classes.items()}}


def _checked(name: str, records: list[RequestRecord], wall_s: float) -> dict[str, Any]:
    report = summarize(records, wall_s)
    if not report["answered"]:
        raise LoadFailed(f"{name}: no request was answered: {report['errors']}")
    return report
