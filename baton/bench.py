"""`baton bench`: a closed loop of streaming requests against any OpenAI-compatible server, and its latencies.

`concurrency` clients send one request after the other; `open_loop`, for other programs, sends each request when it is due. Token
counts are the server's own (`usage`), text pieces are timed as they arrive; the load is made on one event loop, so on a busy machine
the client's own CPU time, which is reported, is part of what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton.bench_arrivals import Arrival
from baton.bench_prompts import make_prompts, words_for
from baton.bench_stats import PERCENTILES, RequestRecord, summarize
from baton.openai_stream import PATHS, Endpoint, StreamFailed, base_url, failure_of_body, is_done, parse_event, request_body

PROBE_WORDS = (24, 96)

Prompt = str | Sequence[int]
"""A text, or token ids where the server takes them (completions only)."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """One run. `timeout_s` bounds each request; `ignore_eos` asks for exactly `output_tokens` tokens (a vLLM extension)."""

    url: str
    model: str
    endpoint: Endpoint
    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    seed: int
    warmup: int = 0
    timeout_s: float = 300.0
    temperature: float = 0.0
    ignore_eos: bool = True
    api_key: str = field(default="", repr=False)


async def send(
    client: httpx.AsyncClient,
    options: BenchOptions,
    prompt: Prompt,
    max_tokens: int,
    *,
    due_s: float | None = None,
    label: str = "",
) -> RequestRecord:
    """One streaming request. Never raises for what the server does: every failure is a record with an error.

    `due_s` (monotonic) is when an open loop wanted to send it: its latencies count from there. `label` is the class of the request.
    """
    extras: dict[str, object] = {"temperature": options.temperature}
    if options.ignore_eos:
        extras["ignore_eos"] = True
    body = request_body(options.endpoint, options.model, prompt, max_tokens, **extras)
    times: list[float] = []
    usage = None
    has_ended = False
    error = ""
    sent_s = time.monotonic()
    try:
        async with (
            asyncio.timeout(options.timeout_s),
            client.stream("POST", options.url + PATHS[options.endpoint], json=body) as reply,
        ):
            if reply.status_code != 200:
                raise failure_of_body(await reply.aread(), reply.status_code)
            async for line in reply.aiter_lines():
                has_ended = has_ended or is_done(line)
                chunk = parse_event(line, options.endpoint)
                if chunk is None:
                    continue
                usage = chunk.usage or usage
                if chunk.text:
                    times.append(time.monotonic())
        if not has_ended:
            error = "stream cut off"
        elif usage is None:
            error = "no usage in the stream"
        elif not times:
            error = "no text"
    except StreamFailed as failure:
        error = failure.kind
    except TimeoutError:
        error = f"no end within {options.timeout_s:g} s"
    except httpx.HTTPError as failure:
        error = type(failure).__name__
    ended_s = time.monotonic()
    if usage is None:
        return RequestRecord(sent_s, ended_s, tuple(times), 0, 0, 0, error, due_s, label)
    counts = (usage.num_prompt_tokens, usage.num_completion_tokens, usage.num_cached_tokens)
    return RequestRecord(sent_s, ended_s, tuple(times), *counts, error, due_s, label)


async def calibrate(client: httpx.AsyncClient, options: BenchOptions) -> int:
    """How many words make about `prompt_tokens` prompt tokens on this server. Raises StreamFailed if it does not answer."""
    probes: list[tuple[int, int]] = []
    for num_words in PROBE_WORDS:
        record = await send(client, options, make_prompts(options.seed + 1, 1, num_words)[0], 2)
        if record.error:
            raise StreamFailed("calibration", f"the server did not answer a first small request: {record.error}")
        probes.append((num_words, record.num_prompt_tokens))
    try:
        return words_for(options.prompt_tokens, (probes[0], probes[1]))
    except ValueError as error:
        raise StreamFailed("calibration", str(error)) from error


async def run_bench(options: BenchOptions, progress: Progress | None = None) -> dict[str, Any]:
    """The whole run: calibration, warm-up, then the measured closed loop. Raises StreamFailed when not even one request works."""
    limits = httpx.Limits(max_connections=options.concurrency + 1, max_keepalive_connections=options.concurrency + 1)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with httpx.AsyncClient(timeout=options.timeout_s, limits=limits, headers=headers, trust_env=False) as client:
        num_words = await calibrate(client, options)
        prompts = make_prompts(options.seed, options.warmup + options.requests, num_words)
        await closed_loop(client, options, prompts[: options.warmup])
        cpu_before_s = client_cpu_s()
        started_s = time.monotonic()
        records = await closed_loop(client, options, prompts[options.warmup :], progress)
        wall_s = time.monotonic() - started_s
        cpu_s = client_cpu_s() - cpu_before_s
    settings = asdict(options)
    del settings["api_key"]
    return {"settings": settings, "client_cpu_s": round(cpu_s, 3), **summarize(records, wall_s)}


async def closed_loop(
    client: httpx.AsyncClient, options: BenchOptions, prompts: Sequence[Prompt], progress: Progress | None = None
) -> list[RequestRecord]:
    """`options.concurrency` clients, each with one request at a time, until all prompts were sent."""
    records: list[RequestRecord] = []
    rest: Iterator[Prompt] = iter(prompts)
    task_id = progress.add_task("requests", total=len(prompts)) if progress else None

    async def one_client() -> None:
        for prompt in rest:
            records.append(await send(client, options, prompt, options.output_tokens))
            if progress and task_id is not None:
                progress.advance(task_id)

    async with asyncio.TaskGroup() as clients:
        for _ in range(min(options.concurrency, len(prompts))):
            clients.create_task(one_client())
    return records


async def open_loop(
    client: httpx.AsyncClient, options: BenchOptions, requests: Sequence[tuple[Arrival, Prompt]]
) -> list[RequestRecord]:
    """Sends each request when it is due, however many are still running, and returns when the last one has ended."""
    start_s = time.monotonic()
    records: list[RequestRecord] = []

    async def one_request(arrival: Arrival, prompt: Prompt) -> None:
        due_s = start_s + arrival.due_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        records.append(await send(client, options, prompt, arrival.output_tokens, due_s=due_s, label=arrival.label))

    async with asyncio.TaskGroup() as running:
        for arrival, prompt in requests:
            running.create_task(one_request(arrival, prompt))
    return records


def client_cpu_s() -> float:
    """CPU seconds that this process has used so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def render(report: dict[str, Any]) -> Table:
    """The report as a table for people."""
    table = Table(title="latency, ms", title_justify="left")
    columns = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    for name, label in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2e_ms", "end to end")):
        values = report[name]
        table.add_row(label, *(f"{values[column]:.1f}" if values else "-" for column in columns))
    return table


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0: every request was answered; 1: some failed; 2: the server could not be used at all."""
    options = BenchOptions(
        url=base_url(arguments.url),
        model=arguments.model,
        endpoint=arguments.endpoint,
        concurrency=arguments.concurrency,
        requests=arguments.requests,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        seed=arguments.seed,
        warmup=arguments.warmup,
        timeout_s=arguments.timeout,
        temperature=arguments.temperature,
        ignore_eos=arguments.ignore_eos,
        api_key=arguments.api_key,
    )
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            report = asyncio.run(run_bench(options, progress))
    except StreamFailed as error:
        console.print(f"baton bench: {error}", style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("baton bench: interrupted")
        return 130
    if arguments.json:
        text = json.dumps(report, indent=2)
        if arguments.json == "-":
            sys.stdout.write(text + "\n")
            return 1 if report["errors"] else 0
        Path(arguments.json).write_text(text + "\n")
    out = Console()
    out.print(render(report))
    out.print(
        f"{report['answered']} of {report['requests']} requests answered in {report['duration_s']:.1f} s; "
        f"output {report['output_tokens_per_s']:.1f} tok/s, input and output {report['total_tokens_per_s']:.1f} tok/s, "
        f"{report['requests_per_s']:.2f} requests/s; "
        f"mean prompt {report['prompt_tokens'] / max(1, report['answered']):.0f} tokens",
        markup=False,
        highlight=False,
    )
    for error_kind, count in report["errors"].items():
        out.print(f"{count} × {error_kind}", style="red", markup=False)
    return 1 if report["errors"] else 0
