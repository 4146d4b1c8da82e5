"""A bounded memory with an age limit: what the fabric keeps of handoffs that ended, or that were opened before they were offered.

It must not know what it remembers; every call takes `now` in monotonic seconds. All entries live equally long, so the oldest
is always the first to go, and each call does work only for what it removes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Remembered(Generic[Key, Value]):
    def __init__(self, num_max: int, age_max_s: float) -> None:
        self._num_max = num_max
        self._age_max_s = age_max_s
        self._entries: OrderedDict[Key, tuple[float, Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_full(self) -> bool:
        return len(self._entries) >= self._num_max

    def put(self, key: Key, value: Value, now: float) -> None:
        """Remembers a value from now on. A full memory forgets its oldest entry."""
        self._entries.pop(key, None)
        if self.is_full:
            self._entries.popitem(last=False)
        self._entries[key] = (now, value)

    def get(self, key: Key) -> Value | None:
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def pop(self, key: Key) -> Value | None:
        entry = self._entries.pop(key, None)
        return None if entry is None else entry[1]

    def items(self) -> list[tuple[Key, Value]]:
        return [(key, value) for key, (_, value) in self._entries.items()]

    def expired(self, now: float) -> list[tuple[Key, Value]]:
        """Removes and returns the entries that reached the age limit."""
        ended = []
        while self._entries:
            key, (since, value) = next(iter(self._entries.items()))
            if now - since < self._age_max_s:
                break
            del self._entries[key]
            ended.append((key, value))
        return ended
