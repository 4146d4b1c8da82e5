"""Hypothesis compares LeaseTable with a dictionary of end times, and Remembered with a list: the plain meaning of both."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.lease import LeaseTable
from kvtransfer.remembered import Remembered

KEYS = st.sampled_from("abcdef")


class Leases(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table: LeaseTable[str] = LeaseTable()
        self.model: dict[str, tuple[float, float]] = {}

    @rule(key=KEYS, duration_s=st.integers(1, 20))
    def grant(self, key: str, duration_s: int) -> None:
        self.table.grant(key, self.now, duration_s)
        self.model[key] = (self.now + duration_s, duration_s)

    @rule(key=KEYS)
    def renew(self, key: str) -> None:
        alive = key in self.model and self.model[key][0] > self.now
        assert self.table.renew(key, self.now) is alive
        if alive:
            self.model[key] = (self.now + self.model[key][1], self.model[key][1])

    @rule(key=KEYS)
    def drop(self, key: str) -> None:
        assert self.table.drop(key) is (self.model.pop(key, None) is not None)

    @rule(seconds=st.integers(0, 8), num_max=st.integers(1, 4))
    def expire(self, seconds: int, num_max: int) -> None:
        self.now += seconds
        due = {key for key, (end, _) in self.model.items() if end <= self.now}
        ended = self.table.expired(self.now, num_max)
        assert len(ended) == len(set(ended)) == min(num_max, len(due)) and set(ended) <= due
        for key in ended:
            del self.model[key]

    @invariant()
    def same_keys(self) -> None:
        assert len(self.table) == len(self.model) and all(key in self.table for key in self.model)
        assert len(self.table._heap) <= 2 * len(self.model) + 64 + len(self.model) + 1, "stale entries are bounded"


Leases.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestLeases = Leases.TestCase


def test_a_lease_that_ended_is_not_revived_by_a_late_renewal() -> None:
    table: LeaseTable[str] = LeaseTable()
    table.grant("a", 0.0, 1.0)
    assert not table.renew("a", 1.0)
    assert table.expired(1.0, 10) == ["a"] and table.expired(2.0, 10) == []


def test_a_lease_needs_a_positive_duration() -> None:
    with pytest.raises(ValueError, match="positive duration"):
        LeaseTable[str]().grant("a", 0.0, 0.0)


class Memory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.memory: Remembered[str, int] = Remembered(3, 10.0)
        self.model: list[tuple[str, int, float]] = []

    @rule(key=KEYS, value=st.integers(1, 9))
    def put(self, key: str, value: int) -> None:
        self.memory.put(key, value, self.now)
        self.model = [e for e in self.model if e[0] != key][-2:] + [(key, value, self.now)]

    @rule(key=KEYS)
    def pop(self, key: str) -> None:
        expected = next((v for k, v, _ in self.model if k == key), None)
        assert self.memory.get(key) == expected and self.memory.pop(key) == expected
        self.model = [e for e in self.model if e[0] != key]

    @rule(seconds=st.integers(0, 12))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        due = [(k, v) for k, v, since in self.model if self.now - since >= 10.0]
        assert self.memory.expired(self.now) == due
        self.model = [e for e in self.model if self.now - e[2] < 10.0]

    @invariant()
    def same_entries(self) -> None:
        assert self.memory.items() == [(k, v) for k, v, _ in self.model] and len(self.memory) <= 3


Memory.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestMemory = Memory.TestCase
