"""The breaker opens for faults alone, probes with one call, and never stays open for ever."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.breaker import Breaker, BreakerPolicy, BreakerState

POLICY = BreakerPolicy(failures_max=3, open_s=1.0, open_max_s=4.0, probe_timeout_s=10.0)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(POLICY)
    for _ in range(POLICY.failures_max):
        assert breaker.try_acquire(now)
        breaker.failed(now)
    assert breaker.state(now) is BreakerState.OPEN
    return breaker


def test_failures_with_a_success_between_them_do_not_open_it() -> None:
    breaker = Breaker(POLICY)
    for _ in range(10):
        breaker.failed(0.0)
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_open_it_lets_nobody_through_until_its_time() -> None:
    breaker = opened()
    assert not breaker.try_acquire(0.99)
    assert breaker.try_acquire(1.0)


def test_half_open_lets_one_probe_through_and_a_look_takes_no_place() -> None:
    breaker = opened()
    assert breaker.is_available(1.0)
    assert breaker.is_available(1.0)
    assert breaker.try_acquire(1.0)
    assert not breaker.is_available(1.0)
    assert not breaker.try_acquire(5.0)


def test_a_good_probe_closes_and_failures_count_from_zero() -> None:
    breaker = opened()
    assert breaker.try_acquire(1.0)
    breaker.succeeded()
    breaker.failed(1.0)
    breaker.failed(1.0)
    assert breaker.state(1.0) is BreakerState.CLOSED


def test_failed_probes_double_the_pause_up_to_the_bound() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(4):
        start = now
        while not breaker.try_acquire(now):
            now += 0.25
        pauses.append(now - start)
        breaker.failed(now)
    assert pauses == [1.0, 2.0, 4.0, 4.0]


def test_a_success_resets_the_pause() -> None:
    breaker = opened()
    assert breaker.try_acquire(1.0)
    breaker.failed(1.0)
    assert breaker.try_acquire(3.0)
    breaker.succeeded()
    for _ in range(3):
        breaker.failed(3.0)
    assert breaker.try_acquire(4.0)


def test_a_late_failure_of_an_earlier_call_does_not_lengthen_the_pause() -> None:
    breaker = opened()
    breaker.failed(0.9)
    assert breaker.try_acquire(1.0)


def test_a_probe_that_never_reports_back_loses_its_place() -> None:
    breaker = opened()
    assert breaker.try_acquire(1.0)
    assert not breaker.try_acquire(10.9)
    assert breaker.try_acquire(11.0)


def test_an_abandoned_probe_frees_its_place_at_once() -> None:
    breaker = opened()
    assert breaker.try_acquire(1.0)
    breaker.abandoned()
    assert breaker.state(1.0) is BreakerState.HALF_OPEN
    assert breaker.try_acquire(1.0)


@pytest.mark.parametrize("wrong", [{"failures_max": 0}, {"open_s": 0.0}, {"open_s": 60.0}, {"probe_timeout_s": 0.0}])
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BreakerPolicy(**wrong)  # type: ignore[arg-type]


class BreakerMachine(RuleBasedStateMachine):
    """Any order of events: it becomes available again by time alone, and never opens without enough failures in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(POLICY)
        self.now = 0.0
        self.failures_in_a_row = 0
        self.num_calls = 0

    @rule(seconds=st.floats(0, 3))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def call(self) -> None:
        available = self.breaker.is_available(self.now)
        assert self.breaker.try_acquire(self.now) is available
        self.num_calls += available

    @precondition(lambda self: self.num_calls > 0)
    @rule(outcome=st.sampled_from(["succeeded", "failed", "abandoned"]))
    def end(self, outcome: str) -> None:
        self.num_calls -= 1
        if outcome == "succeeded":
            self.breaker.succeeded()
            self.failures_in_a_row = 0
        elif outcome == "failed":
            self.breaker.failed(self.now)
            self.failures_in_a_row += 1
        else:
            self.breaker.abandoned()

    @invariant()
    def opens_only_after_failures(self) -> None:
        if self.failures_in_a_row < POLICY.failures_max:
            assert self.breaker.state(self.now) is BreakerState.CLOSED

    @invariant()
    def is_available_again_by_time_alone(self) -> None:
        assert self.breaker.is_available(self.now + POLICY.open_max_s + POLICY.probe_timeout_s)


TestBreakerMachine = BreakerMachine.TestCase
