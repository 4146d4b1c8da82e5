"""Placement takes the least loaded workers that fit, says why, and never one that failed this request."""

from __future__ import annotations

import pytest

from common.errors import NoWorker, Overloaded
from common.ids import Incarnation, WorkerId
from common.types import Role, WorkerInfo, WorkerLoad, WorkerState
from router.placement import Candidate, Demand, Exclusions, Mode, PlacementPolicy, place, worker_key

POLICY = PlacementPolicy(local_prompt_tokens_max=16, local_prefill_tokens_max=100)
NOTHING = Exclusions()
LONG = Demand(num_known_tokens=50, num_tokens_max=80)


def candidate(
    name: str,
    role: Role,
    *,
    queued: int = 0,
    requests: int = 0,
    fingerprint: str = "f",
    model: str = "m",
    longest: int = 1000,
    load: WorkerLoad | None = None,
) -> Candidate:
    info = WorkerInfo(
        worker_id=WorkerId(name),
        incarnation=Incarnation("i"),
        role=role,
        state=WorkerState.READY,
        grpc_address="",
        kv_address="",
        kv_scheme="tcp",
        model=model,
        kv_fingerprint=fingerprint,
        block_size=16,
        num_blocks=100,
        max_sequence_tokens=longest,
        dtype="float32",
        pid=1,
        version="1",
        load=load or WorkerLoad(num_blocks_available=100),
    )
    return Candidate(info, requests, queued)


def p(name: str, **more) -> Candidate:  # type: ignore[no-untyped-def]
    return candidate(name, Role.PREFILL, **more)


def d(name: str, **more) -> Candidate:  # type: ignore[no-untyped-def]
    return candidate(name, Role.DECODE, **more)


def names(placement) -> tuple[str | None, str | None]:  # type: ignore[no-untyped-def]
    return tuple(info.worker_id if info is not None else None for info in (placement.prefill, placement.decode))  # type: ignore[return-value]


def test_least_loaded_pair_with_the_reason_in_words() -> None:
    placement = place(
        LONG, [p("p0", queued=300), p("p1", queued=20)], [d("d0", requests=4), d("d1", requests=1)], POLICY, NOTHING, 0
    )
    assert placement.mode is Mode.DISAGGREGATED and names(placement) == ("p1", "d1")
    assert placement.reason == "prefill p1 (20 tokens queued, least of 2), decode d1 (1 sequences, least of 2)"


def test_published_load_of_other_routers_counts() -> None:
    busy = WorkerLoad(num_running=9, num_blocks_available=100)
    assert names(place(LONG, [p("p0")], [d("d0", load=busy), d("d1", requests=5)], POLICY, NOTHING, 0)) == ("p0", "d1")


def test_equal_workers_take_turns() -> None:
    chosen = {names(place(LONG, [p("p0"), p("p1")], [d("d0"), d("d1")], POLICY, NOTHING, turn)) for turn in range(2)}
    assert chosen == {("p0", "d0"), ("p1", "d1")}


def test_a_worker_without_room_now_comes_last() -> None:
    full = WorkerLoad(num_blocks_available=1)
    assert names(place(LONG, [p("p0")], [d("d0", load=full), d("d1", requests=7)], POLICY, NOTHING, 0)) == ("p0", "d1")


def test_short_prompt_runs_on_decode_alone() -> None:
    placement = place(Demand(16, 40), [p("p0")], [d("d0")], POLICY, NOTHING, 0)
    assert (placement.mode, placement.local_because, names(placement)) == (Mode.LOCAL, "short_prompt", (None, "d0"))
    assert place(Demand(17, 40), [p("p0")], [d("d0")], POLICY, NOTHING, 0).mode is Mode.DISAGGREGATED


def test_short_prompts_over_the_local_budget_are_disaggregated() -> None:
    assert place(Demand(16, 40), [p("p0")], [d("d0", queued=90)], POLICY, NOTHING, 0).mode is Mode.DISAGGREGATED


def test_without_prefill_workers_decode_runs_alone_within_its_budget() -> None:
    placement = place(LONG, [], [d("d0")], POLICY, NOTHING, 0)
    assert (placement.mode, placement.local_because) == (Mode.LOCAL, "no_prefill_worker")
    with pytest.raises(Overloaded, match="over the budget of 100"):
        place(LONG, [], [d("d0", queued=60)], POLICY, NOTHING, 0)


def test_one_prompt_over_the_budget_is_allowed_on_an_idle_worker() -> None:
    assert place(Demand(500, 600), [], [d("d0")], POLICY, NOTHING, 0).mode is Mode.LOCAL


def test_one_token_left_needs_no_decode_worker() -> None:
    placement = place(Demand(50, 51), [p("p0")], [d("d0")], POLICY, NOTHING, 0)
    assert placement.mode is Mode.PREFILL_ONLY and names(placement) == ("p0", None)


def test_pair_must_have_the_same_layout() -> None:
    placement = place(LONG, [p("p0", fingerprint="g"), p("p1", queued=900)], [d("d0")], POLICY, NOTHING, 0)
    assert names(placement) == ("p1", "d0")


def test_failed_workers_are_not_used_again() -> None:
    failed = Exclusions(failed=frozenset({("p0", "i"), ("d0", "i")}))
    assert names(place(LONG, [p("p0"), p("p1", queued=99)], [d("d0"), d("d1", requests=9)], POLICY, failed, 0)) == ("p1", "d1")
    with pytest.raises(NoWorker, match="all 1 decode workers failed"):
        place(LONG, [p("p1")], [d("d0")], POLICY, failed, 0)
    assert place(LONG, [p("p0")], [d("d1")], POLICY, failed, 0).local_because == "no_prefill_worker"


def test_a_restarted_worker_is_another_one() -> None:
    failed = Exclusions(failed=frozenset({("d0", "old life")}))
    assert names(place(LONG, [p("p0")], [d("d0")], POLICY, failed, 0)) == ("p0", "d0")


def test_refusals_everywhere_are_overload_not_absence() -> None:
    with pytest.raises(Overloaded, match="decode workers refused"):
        place(LONG, [p("p0")], [d("d0")], POLICY, Exclusions(busy=frozenset({("d0", "i")})), 0)
    with pytest.raises(Overloaded, match="prefill worker refused"):
        place(LONG, [p("p0")], [d("d0")], POLICY, Exclusions(busy=frozenset({("p0", "i")})), 0)


def test_suspects_come_last_but_are_allowed() -> None:
    suspects = Exclusions(suspect=frozenset({("p0", "i"), ("d0", "i")}))
    assert names(place(LONG, [p("p0"), p("p1", queued=99)], [d("d0")], POLICY, suspects, 0)) == ("p1", "d0")


def test_after_handoff_failures_the_request_is_local() -> None:
    placement = place(LONG, [p("p0")], [d("d0")], POLICY, Exclusions(must_be_local=True), 0)
    assert placement.local_because == "handoff_failures"


def test_no_worker_and_too_small_workers_say_so() -> None:
    with pytest.raises(NoWorker, match="no decode worker is ready"):
        place(LONG, [p("p0")], [], POLICY, NOTHING, 0)
    with pytest.raises(NoWorker, match="can hold 80 tokens"):
        place(LONG, [p("p0")], [d("d0", longest=79)], POLICY, NOTHING, 0)


def test_key_names_worker_and_life() -> None:
    assert worker_key(d("d0").info) == ("d0", "i")
