"""What `baton ps` shows of a fleet: who owns blocks, what is in flight, and a table that fits the terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from baton.ps import as_json, blocks_table, requests_table, workers_table
from common.ids import Incarnation, RequestId, WorkerId
from common.state.store import JournalEntry
from common.types import BlockCensus, Role, WorkerInfo, WorkerLoad, WorkerState

WORKER = WorkerInfo(
    worker_id=WorkerId("decode-0"),
    incarnation=Incarnation("0123456789abcdef"),
    role=Role.DECODE,
    state=WorkerState.DRAINING,
    grpc_address="127.0.0.1:40001",
    kv_address="",
    kv_scheme="ucx",
    model="m",
    kv_fingerprint="f",
    block_size=16,
    num_blocks=100,
    max_sequence_tokens=1600,
    dtype="bfloat16",
    pid=4242,
    version="0",
    load=WorkerLoad(num_running=3, num_waiting=2, num_handoffs=1, num_blocks_available=77),
)
CENSUS = BlockCensus(total=100, free=70, cached=7, held=23, held_by={"seq:cmpl-1#1": 20, "seq:cmpl-2#1": 3})
ENTRY = JournalEntry(RequestId("cmpl-1"), "streaming", 2, "router-1", "m", "prefill-0", "decode-0", 31, 5, created_wall_s=10.0)


def rendered(table: object, width: int) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=width).print(table)
    return output.getvalue().splitlines()


@pytest.mark.parametrize(("width", "is_wide"), [(80, False), (160, True)])
def test_a_worker_takes_one_line_at_any_width(width: int, is_wide: bool) -> None:
    lines = [line for line in rendered(workers_table([WORKER], width), width) if "decode-0" in line]
    [line] = lines
    assert all(word in line for word in ("decode", "draining", "4242", "3", "2", "1"))
    assert ("0123456789abcdef" in line and "77/100" in line and "127.0.0.1:40001" in line) is is_wide


def test_blocks_name_their_owners_the_largest_first() -> None:
    text = "\n".join(rendered(blocks_table({WORKER.worker_id: CENSUS}), 140))
    assert "seq:cmpl-1#1: 20, seq:cmpl-2#1: 3" in text
    assert all(number in text for number in ("100", "70", "7", "23"))


def test_requests_show_state_epoch_and_age() -> None:
    [line] = [line for line in rendered(requests_table([ENTRY], 12.5), 140) if "cmpl-1" in line]
    assert all(word in line for word in ("streaming", "2", "prefill-0", "decode-0", "31", "5", "2.5 s"))


def test_json_has_everything() -> None:
    value = json.loads(as_json([WORKER], {WORKER.worker_id: CENSUS}, [ENTRY]))
    assert value["workers"][0]["incarnation"] == "0123456789abcdef"
    assert value["workers"][0]["state"] == "draining"
    assert value["blocks"]["decode-0"]["held_by"] == {"seq:cmpl-1#1": 20, "seq:cmpl-2#1": 3}
    assert value["requests"][0]["epoch"] == 2
