"""The bounded buffer between a request's orchestration and its client connection.

The orchestrator writes without waiting; text that the client has not taken yet is joined, so a slow client costs characters and not
objects. When more than `chars_max` wait, `put` refuses and only that request is aborted; one reader, one writer, one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import BatonError
from common.types import FinishReason
from router.logprobs import RatedToken

CHARS_OF_LOGPROB = 64
"""What one token or alternative with its logprob counts for in the buffer, about what it takes in the answer."""


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text; may be empty for the first token, whose arrival alone starts the answer. `rated`: logprobs, where asked for."""

    text: str
    rated: tuple[RatedToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    finish_reason: FinishReason
    usage: Usage
    timeline: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Errored:
    error: BatonError


OutputItem = TextDelta | Ended | Errored


class OutputSignals:
    """What wakes a reader: `wake` when a buffer has something new, `overflowed` when a writer was refused. Buffers may share them."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.overflowed = asyncio.Event()


class OutputBuffer:
    """Text, then exactly one Ended or Errored, taken by one reader that waits for the signals."""

    def __init__(self, chars_max: int, signals: OutputSignals) -> None:
        self._chars_max = chars_max
        self._signals = signals
        self._pieces: list[str] = []
        self._rated: list[RatedToken] = []
        self._num_chars = 0
        self._end: Ended | Errored | None = None

    def put(self, text: str, rated: Sequence[RatedToken] = ()) -> bool:
        """False, and nothing kept, when the client is too far behind."""
        num_chars = len(text) + CHARS_OF_LOGPROB * sum(1 + len(token.top) for token in rated)
        if self._num_chars + num_chars > self._chars_max and self._num_chars:
            self._signals.overflowed.set()
            return False
        self._pieces.append(text)
        self._rated.extend(rated)
        self._num_chars += num_chars
        self._signals.wake.set()
        return True

    def put_prompt(self, text: str, rated: Sequence[RatedToken]) -> None:
        """An echoed prompt, which comes once, before all else; the client sent it, so it does not count as being behind."""
        self._pieces.append(text)
        self._rated.extend(rated)
        self._signals.wake.set()

    def end(self, item: Ended | Errored) -> None:
        if self._end is None:
            self._end = item
            self._signals.wake.set()

    def take(self) -> OutputItem | None:
        """All waiting text in one piece, or the end, or None when there is nothing new."""
        if not self._pieces:
            return self._end
        item = TextDelta("".join(self._pieces), tuple(self._rated))
        self._pieces.clear()
        self._rated.clear()
        self._num_chars = 0
        return item
