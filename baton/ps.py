"""`baton ps`: the fleet as Redis has it: workers, requests in flight with their state, and who owns how many blocks.

Reads through the state store's protocol and changes nothing. What Redis holds is soft and a heartbeat old; the output says so by
showing ages, not promises.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.instance import InstanceError, find_running
from common.errors import BatonError
from common.ids import WorkerId
from common.state.open import open_store
from common.state.store import JournalEntry
from common.types import BlockCensus, WorkerInfo

FINAL_STATES = ("finished", "failed", "cancelled")


async def read_fleet(redis_url: str, cluster: str) -> tuple[list[WorkerInfo], dict[WorkerId, BlockCensus], list[JournalEntry]]:
    """Workers, block ownership and the newest journal entries. Raises StoreUnavailable."""
    store = open_store(redis_url, cluster)
    await store.start()
    try:
        return await store.list_workers(), await store.block_ownership(), await store.list_journal()
    finally:
        await store.close()


WIDE_COLUMNS = 150
"""Below this many columns a terminal gets the short table of workers; `--json` has everything in any case."""


def workers_table(workers: list[WorkerInfo], width: int = WIDE_COLUMNS) -> Table:
    table = Table(title=f"workers ({len(workers)})", title_justify="left")
    columns: list[tuple[str, bool, Callable[[WorkerInfo], str]]] = [
        ("worker", False, lambda info: info.worker_id),
        ("role", False, lambda info: info.role.value),
        ("state", False, lambda info: info.state.value),
        ("incarnation", True, lambda info: info.incarnation),
        ("pid", False, lambda info: str(info.pid)),
        ("address", True, lambda info: info.grpc_address),
        ("kv", True, lambda info: f"{info.kv_scheme}://{info.kv_address}" if info.kv_address else info.kv_scheme),
        ("dtype", True, lambda info: info.dtype),
        ("running", False, lambda info: str(info.load.num_running)),
        ("waiting", False, lambda info: str(info.load.num_waiting)),
        ("handoffs", False, lambda info: str(info.load.num_handoffs)),
        ("free blocks", True, lambda info: f"{info.load.num_blocks_available}/{info.num_blocks}"),
    ]
    shown = [(name, show) for name, is_wide, show in columns if width >= WIDE_COLUMNS or not is_wide]
    for name, _ in shown:
        table.add_column(name, overflow="fold")
    for info in workers:
        table.add_row(*[show(info) for _, show in shown])
    return table


def requests_table(entries: list[JournalEntry], now_wall_s: float) -> Table:
    table = Table(title=f"requests ({len(entries)})", title_justify="left")
    for column in ("request", "state", "epoch", "prefill", "decode", "prompt", "tokens", "age", "error"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        table.add_row(
            entry.request_id,
            entry.state,
            str(entry.epoch),
            entry.prefill_worker or "-",
            entry.decode_worker or "-",
            str(entry.num_prompt_tokens),
            str(entry.num_tokens),
            f"{max(0.0, now_wall_s - entry.created_wall_s):.1f} s",
            entry.error_kind,
        )
    return table


def blocks_table(ownership: dict[WorkerId, BlockCensus]) -> Table:
    table = Table(title="blocks", title_justify="left")
    for column in ("worker", "total", "free", "cached", "held", "held by"):
        table.add_column(column, overflow="fold")
    for worker_id, census in sorted(ownership.items()):
        holders = ", ".join(f"{owner}: {count}" for owner, count in sorted(census.held_by.items(), key=lambda item: -item[1])[:8])
        if len(census.held_by) > 8:
            holders += f", and {len(census.held_by) - 8} more"
        table.add_row(worker_id, str(census.total), str(census.free), str(census.cached), str(census.held), holders or "-")
    return table


def as_json(workers: list[WorkerInfo], ownership: dict[WorkerId, BlockCensus], entries: list[JournalEntry]) -> str:
    """The same as one JSON object; enums by their value."""

    def plain(value: object) -> Any:
        if isinstance(value, Enum):
            return value.value
        raise TypeError(f"{type(value).__name__} is not JSON")

    return json.dumps(
        {
            "workers": [asdict(info) for info in workers],
            "blocks": {worker_id: asdict(census) for worker_id, census in ownership.items()},
            "requests": [asdict(entry) for entry in entries],
        },
        default=plain,
        indent=2,
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when there is no instance or Redis does not answer."""
    console = Console()
    try:
        redis_url, cluster = arguments.redis_url, arguments.cluster
        if not redis_url:
            description = find_running(arguments.instance)
            redis_url, cluster = description.redis_url, description.cluster
        workers, ownership, entries = asyncio.run(read_fleet(redis_url, cluster))
    except (InstanceError, BatonError) as error:
        Console(stderr=True).print(f"baton ps: {error}", style="red", markup=False)
        return 1
    if not arguments.all:
        entries = [entry for entry in entries if entry.state not in FINAL_STATES]
    if arguments.json:
        console.print(as_json(workers, ownership, entries), markup=False, highlight=False, soft_wrap=True)
        return 0
    console.print(workers_table(workers, console.width), requests_table(entries, time.time()), blocks_table(ownership))
    return 0
