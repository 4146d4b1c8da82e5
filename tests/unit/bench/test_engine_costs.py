"""The scheduler's benchmark drives private parts of the scheduler: this is where a change of those shows."""

from __future__ import annotations

import pytest

from bench.engine_costs import admission, decode_step


def test_decode_step_times_all_its_parts() -> None:
    costs = decode_step(3, 40, 20)
    assert [cost.what for cost in costs] == ["decode schedule", "decode apply", "decode publish"]
    assert all(cost.us > 0 and cost.num_running == 3 for cost in costs)


@pytest.mark.parametrize("num_shared", [0, 48])
def test_admission_admits_and_ends_all_that_wait(num_shared: int) -> None:
    costs = admission(3, 5, 64, num_shared)
    assert [cost.what.split()[-1] for cost in costs] == ["take", "admit", "abort"]
    assert all(cost.us > 0 and cost.num_waiting == 5 for cost in costs)
