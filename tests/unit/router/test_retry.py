"""The retry column of the error table: who is tried again, without whom, and how often."""

from __future__ import annotations

import pytest

from common.errors import ERROR_TABLE, error_from_kind
from router.events import LegRole
from router.placement import Mode, Placement
from router.retry import ATTEMPTS_MAX, AttemptFailed, RetryState
from tests.unit.router.test_placement import d, p

PAIR = Placement(Mode.DISAGGREGATED, p("p0").info, d("d0").info, "")
D0, P0 = ("d0", "i"), ("p0", "i")


def failure(kind: str, role: LegRole = LegRole.DECODE) -> AttemptFailed:
    return AttemptFailed(error_from_kind(kind, "x"), role, D0 if role is LegRole.DECODE else P0)


@pytest.mark.parametrize("kind", ["WorkerUnavailable", "Draining", "NoWorker"])
def test_a_worker_that_failed_is_excluded(kind: str) -> None:
    state = RetryState()
    assert state.record(failure(kind, LegRole.PREFILL), PAIR, False)
    assert state.exclusions().failed == {P0}


def test_two_refusals_then_the_client_is_told() -> None:
    state = RetryState()
    assert [state.record(failure("Overloaded"), PAIR, False) for _ in range(3)] == [True, True, False]
    assert state.exclusions().busy == {D0} and not state.exclusions().failed
    state.forget_busy()
    assert not state.exclusions().busy


def test_a_stream_that_has_begun_is_not_given_up_for_refusals() -> None:
    state = RetryState()
    assert all(state.record(failure("Overloaded"), PAIR, True) for _ in range(ATTEMPTS_MAX - 1))
    assert not state.record(failure("Overloaded"), PAIR, True)


@pytest.mark.parametrize("kind", ["HandoffFailed", "LeaseExpired"])
def test_failed_handoffs_suspect_the_pair_and_end_in_local_decode(kind: str) -> None:
    state = RetryState()
    assert state.record(failure(kind), PAIR, False)
    assert state.exclusions().suspect == {P0, D0} and not state.exclusions().must_be_local
    assert state.record(failure(kind), PAIR, False)
    assert state.exclusions().must_be_local


def test_corrupt_kv_is_recomputed_once_without_that_prefill_worker() -> None:
    state = RetryState()
    assert state.record(failure("KVCorrupt"), PAIR, False)
    assert state.exclusions().must_be_local and state.exclusions().failed == {P0}
    assert not state.record(failure("KVCorrupt"), PAIR, False)


@pytest.mark.parametrize("kind", [k for k, rule in ERROR_TABLE.items() if rule.retry.value in ("never", "client")])
def test_other_kinds_are_never_retried(kind: str) -> None:
    assert not RetryState().record(failure(kind), PAIR, True)


def test_attempts_are_bounded() -> None:
    state = RetryState()
    assert sum(state.record(failure("WorkerUnavailable"), PAIR, True) for _ in range(50)) == ATTEMPTS_MAX - 1
