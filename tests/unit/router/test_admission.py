"""Admission is bounded, refuses at once with a usable hint, and never counts a permit twice."""

from __future__ import annotations

import pytest

from common.errors import Draining, Overloaded
from router.admission import Admission


def test_several_permits_are_taken_together_or_not_at_all() -> None:
    admission = Admission(requests_max=3)
    permits = admission.try_acquire_many(0.0, 2)
    with pytest.raises(Overloaded):
        admission.try_acquire_many(0.0, 2)
    assert admission.num_active == 2
    for permit in permits:
        permit.release(1.0)
    assert len(admission.try_acquire_many(1.0, 3)) == 3


def test_surplus_is_refused_with_retry_after() -> None:
    admission = Admission(requests_max=2)
    permits = [admission.try_acquire(0.0) for _ in range(2)]
    with pytest.raises(Overloaded, match="2 requests are being served, the limit is 2") as refused:
        admission.try_acquire(0.0)
    assert refused.value.retry_after_s == 1.0 and admission.num_refused == 1
    permits[0].release(1.0)
    admission.try_acquire(1.0)


def test_release_is_idempotent() -> None:
    admission = Admission(requests_max=1)
    permit = admission.try_acquire(0.0)
    permit.release(1.0)
    permit.release(1.0)
    assert admission.num_active == 0


def test_hint_follows_the_rate_of_ends_within_bounds() -> None:
    admission = Admission(requests_max=100)
    permits = [admission.try_acquire(0.0) for _ in range(11)]
    for index, permit in enumerate(permits):
        permit.release(5.0 * index)
    assert admission.retry_after_s(50.0) == pytest.approx(50.0 / 11)
    assert admission.retry_after_s(10_000.0) == 30.0
    assert Admission(requests_max=1).retry_after_s(0.0) == 1.0


def test_draining_refuses_everything() -> None:
    admission = Admission(requests_max=1, is_draining=True)
    with pytest.raises(Draining):
        admission.check(0.0)
