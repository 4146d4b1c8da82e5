"""Orders the sequences that wait for a slot and blocks: preempted ones first by arrival, then new ones as they came.

A preempted sequence has been promised its place, so a new arrival never overtakes it and it does not count against the bound of
the line. Pure; it must not know blocks or budgets; `num_tokens` counts the known tokens that wait to be computed. Each operation costs
the same however long the line is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from common.ids import AttemptKey
from engine.sequence import Sequence, State, arrival_of


class WaitingLine:
    def __init__(self) -> None:
        self._preempted: list[Sequence] = []
        # Not a dict: one that has lost its first entries searches for the new first one through all of them.
        self._new: OrderedDict[AttemptKey, Sequence] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._preempted) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._new.values()

    @property
    def num_new(self) -> int:
        return len(self._new)

    def add(self, sequence: Sequence) -> None:
        """A new arrival, behind all others."""
        assert sequence.state is State.WAITING
        self._new[sequence.key] = sequence
        self.num_tokens += len(sequence.token_ids)

    def put_back(self, sequence: Sequence) -> None:
        """A preempted sequence, before all new ones."""
        assert sequence.state is State.WAITING
        insort(self._preempted, sequence, key=arrival_of)
        self.num_tokens += len(sequence.token_ids)

    def head(self) -> Sequence | None:
        """The one sequence that may be admitted next; nobody behind it is, however small, or large ones would starve."""
        return self._preempted[0] if self._preempted else next(iter(self._new.values()), None)

    def remove(self, sequence: Sequence) -> None:
        if self._new.pop(sequence.key, None) is None:
            index = bisect_left(self._preempted, sequence.arrival, key=arrival_of)
            assert self._preempted[index] is sequence, f"{sequence.key} does not wait"
            del self._preempted[index]
        self.num_tokens -= len(sequence.token_ids)
