"""What "ready" means, what is shown meanwhile, and the timeline in words."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from baton.readiness import NotReady, View, describe_event, doing, view_of, wait_ready
from baton.timeline_text import byte_count, timeline_rows
from common.errors import StoreUnavailable
from common.types import WorkerInfo
from tests.unit.baton.fake_openai import FakeOpenAI

ROLES = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


async def no_workers() -> list[WorkerInfo]:
    return []


async def store_away() -> list[WorkerInfo]:
    raise StoreUnavailable("away")


def logs(folder: Path) -> dict[str, Path]:
    return {name: folder / f"{name}.log" for name in ("router", *ROLES)}


async def test_ready_means_that_the_router_can_use_all_of_them(tmp_path: Path) -> None:
    seen: dict[str, bool] = {}
    async with FakeOpenAI(ready_body={"workers": {"prefill": 1, "decode": 1}}) as server:

        def progress(name: str, is_ready: bool, detail: str) -> None:
            seen[name] = is_ready
            server.ready_body = {"workers": {"prefill": 1, "decode": 2}}

        await wait_ready(server.url, logs(tmp_path), ROLES, no_workers, 20, progress)
    assert seen == {"router": True, "prefill-0": True, "decode-0": True, "decode-1": True}


async def test_the_deadline_names_what_is_missing_and_whom_the_router_refuses(tmp_path: Path) -> None:
    details: dict[str, str] = {}
    body = {"workers": {"prefill": 1, "decode": 1}, "refused": {"decode-1/abc": "block size 8, others have 16"}}
    async with FakeOpenAI(ready_body=body) as server:
        with pytest.raises(NotReady, match="1 of 1 prefill, 1 of 2 decode.*decode-1/abc is refused: block size 8"):
            await wait_ready(
                server.url, logs(tmp_path), ROLES, store_away, 0.5, lambda name, ok, text: details.update({name: text})
            )
    assert details["decode-1"] == "refused by the router: block size 8, others have 16"


async def test_a_router_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="router did not answer"):
        await wait_ready("http://127.0.0.1:9", logs(tmp_path), ROLES, no_workers, 0.3, lambda *_: None)


@pytest.mark.parametrize("body", [None, [], "x", {}, {"workers": []}, {"workers": {}}])
def test_an_unexpected_answer_is_not_ready(body: object) -> None:
    assert not view_of(body).covers({"decode": 1})
    assert not View(False, {"decode": 1}).covers({"decode": 1}), "without a router nothing is ready"


def test_the_last_log_line_says_what_a_child_does(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert doing(log) == "starting"
    log.write_text(
        '{"event": "old"}\n' + json.dumps({"event": "weights_loading", "percent": 40, "ts": "now", "nested": {}}) + "\n"
    )
    assert doing(log) == "weights loading · percent 40"
    log.write_text("Traceback: plain text\n")
    assert doing(log) == "Traceback: plain text"
    assert len(describe_event({"event": "e", "text": "y" * 1000})) <= 120


def test_the_timeline_in_words_in_the_order_of_things() -> None:
    timeline: dict[str, Any] = {
        "mode": "disaggregated", "prefill_worker": "p", "decode_worker": "d", "transport": "ucx", "ttft_s": 0.0215,
        "stages": {"tokenise": 0.001, "prefill_queue": 0.002, "prefill": 0.0105, "first_token_out": 0.0001},
        "handoff": {"num_bytes": 1 << 20, "num_frames": 3, "num_cached_tokens": 32, "stages": {"transfer": 0.004, "scatter": 0.001}},
    }  # fmt: skip
    rows = timeline_rows(timeline, tokens_per_s=12.34)
    assert [label for label, _ in rows] == [
        "route", "tokenised", "queued at prefill", "prefill computed", "first token sent", "first token after", "KV moved", "decode",
    ]  # fmt: skip
    values = dict(rows)
    assert values["route"] == "p → d (disaggregated)"
    assert values["KV moved"] == "1.0 MiB in 3 frames over ucx, transfer 4.0 ms, scatter 1.0 ms; 32 tokens were there already"
    assert values["decode"] == "12.3 tokens/s" and values["first token after"] == "21.5 ms"


def test_a_timeline_without_a_handoff_says_so_and_none_says_nothing() -> None:
    assert ("KV moved", "nothing: computed where it was decoded") in timeline_rows({"mode": "local", "handoff": None}, 0)
    assert timeline_rows({}, 0) == []


@pytest.mark.parametrize(
    ("num", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.0 GiB")]
)
def test_byte_counts(num: int, text: str) -> None:
    assert byte_count(num) == text


async def test_a_cancelled_wait_ends(tmp_path: Path) -> None:
    waiting = asyncio.create_task(wait_ready("http://127.0.0.1:9", logs(tmp_path), ROLES, no_workers, 60, lambda *_: None))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
