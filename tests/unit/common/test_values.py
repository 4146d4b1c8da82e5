"""Errors, ids, clocks and stored values: the small things that everything else leans on."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import grpc
import pytest

from common.clock import FakeClock, SystemClock
from common.errors import ERROR_TABLE, BatonError, Internal, InvalidRequest, Overloaded, Retry, error_from_kind
from common.ids import (
    ID_LENGTH_MAX,
    AttemptKey,
    Incarnation,
    RequestId,
    WorkerId,
    new_handoff_id,
    new_incarnation,
    new_request_id,
    new_router_id,
)
from common.state import codec
from common.state.store import JournalEntry
from common.types import BlockCensus, Role, WorkerInfo, WorkerLoad, WorkerState
from common.version import VERSION

ROOT = Path(__file__).resolve().parents[3]
INFO = WorkerInfo(
    worker_id=WorkerId("w"), incarnation=Incarnation("i"), role=Role.PREFILL, state=WorkerState.DRAINING, grpc_address="a:1",
    kv_address="a:2", kv_scheme="ucx", model="m", kv_fingerprint="f", block_size=16, num_blocks=8, max_sequence_tokens=64,
    dtype="bfloat16", pid=1, version="0", load=WorkerLoad(1, 2, 3, 4, 5),
)  # fmt: skip


def test_every_error_kind_has_a_rule_and_every_rule_an_error() -> None:
    assert {cls.kind for cls in BatonError.__subclasses__()} == set(ERROR_TABLE)


@pytest.mark.parametrize("kind", sorted(ERROR_TABLE))
def test_a_kind_survives_the_wire_with_message_and_hint(kind: str) -> None:
    error = error_from_kind(kind, "7 of 3 blocks", retry_after_s=1.5)
    assert (error.kind, error.message, str(error), error.retry_after_s) == (kind, "7 of 3 blocks", "7 of 3 blocks", 1.5)
    assert error.rule is ERROR_TABLE[kind]


@pytest.mark.parametrize("kind", sorted(ERROR_TABLE))
def test_a_rule_names_real_codes_and_server_faults_are_never_the_clients(kind: str) -> None:
    rule = ERROR_TABLE[kind]
    assert rule.grpc_code in grpc.StatusCode.__members__
    assert 400 <= rule.http_status <= 599
    if rule.retry in (Retry.NEW_HANDOFF, Retry.RECOMPUTE_ONCE):
        assert rule.http_status == 503, "what we retry ourselves is never the client's fault"


def test_an_unknown_kind_becomes_internal_and_says_so() -> None:
    error = error_from_kind("Gremlins", "in the pool")
    assert isinstance(error, Internal)
    assert "Gremlins" in error.message
    assert "in the pool" in error.message


def test_an_error_carries_its_field_and_hint() -> None:
    assert InvalidRequest("no", param="temperature", code="x").param == "temperature"
    assert Overloaded("full", retry_after_s=2.0).retry_after_s == 2.0


def test_ids_are_random_prefixed_and_short_enough() -> None:
    for make in (lambda: new_request_id("chatcmpl"), new_handoff_id, new_incarnation, new_router_id):
        ids = {make() for _ in range(100)}
        assert len(ids) == 100
        assert all(0 < len(name) <= ID_LENGTH_MAX for name in ids)
    assert new_request_id("cmpl").startswith("cmpl-")


def test_attempts_of_a_request_differ_by_epoch() -> None:
    first, second = AttemptKey(RequestId("r"), 1), AttemptKey(RequestId("r"), 2)
    assert first < second
    assert str(second) == "r#2"


def test_a_fake_clock_moves_only_forward_and_only_when_told() -> None:
    clock = FakeClock(5.0)
    assert clock.monotonic() == clock.wall() == 5.0
    assert clock.advance(1.5) == clock.monotonic() == 6.5
    with pytest.raises(ValueError, match="-1"):
        clock.advance(-1)


def test_the_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.wall() > 1.7e9


def test_the_version_is_that_of_the_package() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION


def test_a_worker_record_survives_and_is_plain_json() -> None:
    text = codec.encode_worker(INFO)
    assert codec.decode_worker(text) == INFO
    assert set(json.loads(text)) == {field.name for field in fields(WorkerInfo)}


def test_a_census_survives() -> None:
    census = BlockCensus(4, 1, 1, 2, {"seq:é": 2})
    assert codec.decode_census(codec.encode_census(census)) == census


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"role":"cook"}', codec.encode_worker(INFO).replace('"pid":1,', "")])
def test_a_damaged_record_raises_what_readers_expect(text: str) -> None:
    with pytest.raises(codec.UNREADABLE):
        codec.decode_worker(text)


def test_a_record_with_a_field_of_another_version_is_unreadable_not_misread() -> None:
    record = json.loads(codec.encode_worker(replace(INFO, pid=2))) | {"new_field": 1}
    with pytest.raises(codec.UNREADABLE):
        codec.decode_worker(json.dumps(record))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", "16"),
        ("block_size", 16.0),
        ("pid", True),
        ("worker_id", 7),
        ("model", None),
        ("load", []),
        ("role", "cook"),
    ],
)
def test_a_worker_record_with_a_value_of_the_wrong_type_is_unreadable_not_misread(name: str, value: object) -> None:
    record = json.loads(codec.encode_worker(INFO)) | {name: value}
    with pytest.raises(codec.UNREADABLE):
        codec.decode_worker(json.dumps(record))


@pytest.mark.parametrize("change", [{"num_running": "3"}, {"num_running": 1.5}, {"unknown": 1}])
def test_a_load_of_the_wrong_form_is_unreadable(change: dict[str, object]) -> None:
    record = json.loads(codec.encode_worker(INFO))
    record["load"] |= change
    with pytest.raises(codec.UNREADABLE):
        codec.decode_worker(json.dumps(record))


@pytest.mark.parametrize(
    "text", ["[]", "null", "7", '"total"', '{"total":1}', '{"total":1,"free":1,"cached":0,"held":0,"held_by":{"a":"b"}}']
)
def test_a_damaged_census_is_unreadable(text: str) -> None:
    with pytest.raises(codec.UNREADABLE):
        codec.decode_census(text)


def test_a_journal_entry_survives_and_whole_seconds_are_seconds() -> None:
    entry = JournalEntry(RequestId("r"), "streaming", 2, "router", "m", updated_wall_s=3.5)
    assert codec.decode_journal(codec.encode_journal(entry)) == entry
    assert codec.decode_journal(codec.encode_journal(entry).replace("3.5", "3")).updated_wall_s == 3
    with pytest.raises(codec.UNREADABLE):
        codec.decode_journal(codec.encode_journal(entry).replace('"epoch":2', '"epoch":"2"'))
