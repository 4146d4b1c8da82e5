"""Waits grow, stay within their bounds and end."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.backoff import Backoff, BackoffPolicy

ENDLESS = BackoffPolicy(first_s=0.1, factor=2.0, wait_max_s=2.0, tries_max=None, total_max_s=None)


@given(seed=st.integers(0, 2**32))
def test_each_wait_is_in_the_upper_half_of_its_step(seed: int) -> None:
    backoff = Backoff(ENDLESS, Random(seed), 0.0)
    for step_s in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0):
        wait_s = backoff.next_wait_s(0.0)
        assert wait_s is not None
        assert step_s / 2 <= wait_s <= step_s


def test_waits_of_different_callers_differ() -> None:
    assert len({Backoff(ENDLESS, Random(seed), 0.0).next_wait_s(0.0) for seed in range(50)}) == 50


def test_it_gives_up_after_the_number_of_tries() -> None:
    backoff = Backoff(BackoffPolicy(tries_max=3, total_max_s=None), Random(1), 0.0)
    assert [backoff.next_wait_s(0.0) is None for _ in range(5)] == [False, False, False, True, True]
    assert backoff.num_waits == 3


@given(seed=st.integers(0, 2**32), call_s=st.floats(0, 1))
def test_it_never_waits_past_the_total_and_then_gives_up(seed: int, call_s: float) -> None:
    backoff = Backoff(BackoffPolicy(first_s=0.3, wait_max_s=1.0, tries_max=None, total_max_s=5.0), Random(seed), 10.0)
    now = 10.0
    for _ in range(100):
        now += call_s
        wait_s = backoff.next_wait_s(now)
        if wait_s is None:
            assert now >= 15.0
            return
        now += wait_s
        assert now <= 15.0 + 1e-9
    pytest.fail("it never gave up")


def test_a_success_starts_a_new_series() -> None:
    backoff = Backoff(BackoffPolicy(first_s=0.1, tries_max=2, total_max_s=1.0), Random(3), 0.0)
    backoff.next_wait_s(0.0)
    backoff.next_wait_s(0.0)
    assert backoff.next_wait_s(0.0) is None
    backoff.reset(50.0)
    wait_s = backoff.next_wait_s(50.5)
    assert wait_s is not None
    assert wait_s <= 0.1


@pytest.mark.parametrize("wrong", [{"first_s": 0.0}, {"first_s": 3.0, "wait_max_s": 2.0}, {"factor": 0.5}])
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BackoffPolicy(**wrong)  # type: ignore[arg-type]
