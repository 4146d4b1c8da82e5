"""When is the fleet ready? Asks the router what it can use, and registry and logs what the workers do meanwhile.

The router's `/readyz` decides, so "ready" means what a request would find, not that processes exist. Registry and logs are
for the display only. All waits are bounded by one deadline in seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from baton.children import tail
from common.errors import StoreUnavailable
from common.types import WorkerInfo, WorkerState

POLL_S = 0.2


class NotReady(Exception):
    """The deadline passed. The message says what was missing."""


@dataclass(frozen=True, slots=True)
class View:
    """What the router says: itself reachable, how many workers of each role it can use, and whom it refuses and why."""

    is_router_up: bool
    num_usable: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def covers(self, wanted: Mapping[str, int]) -> bool:
        return self.is_router_up and all(self.num_usable.get(role, 0) >= count for role, count in wanted.items())


def view_of(body: object) -> View:
    """The view in a `/readyz` body. A body of another shape is a router that cannot use anybody yet."""
    if not isinstance(body, dict):
        return View(True)
    workers, refused = body.get("workers"), body.get("refused")
    usable = {str(role): int(count) for role, count in workers.items()} if isinstance(workers, dict) else {}
    return View(True, usable, {str(who): str(why) for who, why in refused.items()} if isinstance(refused, dict) else {})


async def read_view(client: httpx.AsyncClient, url: str) -> View:
    """One look; a router that does not answer yet is an empty view."""
    try:
        return view_of((await client.get(url + "/readyz")).json())
    except (httpx.HTTPError, ValueError):
        return View(False)


Progress = Callable[[str, bool, str], None]
"""Told (name, is ready, what it does)."""


async def wait_ready(
    url: str,
    logs: Mapping[str, Path],
    roles: Mapping[str, str],
    list_workers: Callable[[], Awaitable[list[WorkerInfo]]],
    timeout_s: float,
    on_progress: Progress,
) -> None:
    """Returns once the router can use all workers. `logs`: child → its log, `router` among them; `roles`: worker → role.

    Raises NotReady after `timeout_s` seconds.
    """
    wanted = Counter(roles.values())
    view = View(False)
    states: dict[str, WorkerState] = {}
    try:
        async with asyncio.timeout(timeout_s), httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            while True:
                view = await read_view(client, url)
                states = await _registered(list_workers, states)
                is_all = view.covers(wanted)
                on_progress("router", view.is_router_up, url if view.is_router_up else doing(logs["router"]))
                for name in roles:
                    is_ready = is_all or states.get(name) is WorkerState.READY
                    on_progress(name, is_ready, _detail(name, is_ready, view, logs[name]))
                if is_all:
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise NotReady(_missing(view, wanted, states, timeout_s)) from None


async def _registered(
    list_workers: Callable[[], Awaitable[list[WorkerInfo]]], before: dict[str, WorkerState]
) -> dict[str, WorkerState]:
    try:
        return {info.worker_id: info.state for info in await list_workers()}
    except StoreUnavailable:
        return before


def _detail(name: str, is_ready: bool, view: View, log_path: Path) -> str:
    refusals = [why for who, why in view.refused.items() if who.startswith(f"{name}/")]
    if refusals:
        return f"refused by the router: {refusals[-1]}"
    return "" if is_ready else doing(log_path)


def _missing(view: View, wanted: Mapping[str, int], states: Mapping[str, WorkerState], timeout_s: float) -> str:
    if not view.is_router_up:
        return f"the router did not answer within {timeout_s:.0f} s"
    counts = ", ".join(f"{view.num_usable.get(role, 0)} of {count} {role}" for role, count in wanted.items())
    text = f"after {timeout_s:.0f} s the router can use {counts} workers"
    silent = sorted(name for name, state in states.items() if state is not WorkerState.READY)
    if silent:
        text += f"; not ready: {', '.join(silent)}"
    return "; ".join([text, *(f"{who} is refused: {why}" for who, why in view.refused.items())])


def doing(log_path: Path) -> str:
    """What a child last said, in a few words: the event of its last JSON log line with its simple fields."""
    lines = tail(log_path, num_lines=1)
    if not lines:
        return "starting"
    try:
        record = json.loads(lines[0])
    except ValueError:
        return lines[0][:100]
    return describe_event(record) if isinstance(record, dict) else lines[0][:100]


_HEAD_FIELDS = frozenset(
    {"event", "level", "ts", "logger", "pid", "service", "worker_id", "router_id", "incarnation", "traceback"}
)


def describe_event(record: Mapping[str, Any]) -> str:
    """`{"event": "load_progress", "percent": 40, …}` → `load progress · percent 40`."""
    event = str(record.get("event", "")).replace("_", " ") or "starting"
    fields = [
        f"{name} {value}" for name, value in record.items() if name not in _HEAD_FIELDS and isinstance(value, str | int | float)
    ]
    return " · ".join([event, *fields])[:120]
