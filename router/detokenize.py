"""From token ids to text, a piece at a time: never half a character, never a piece of a stop string.

Two exact ways: byte-level vocabularies (GPT-2 family, Llama 3, Qwen, SmolLM) are decoded by bytes, all others through a small window of
the tokenizer's own decoder. Streamed and whole responses use the same path, so their texts are equal; no state outlives a request.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

_REPLACEMENT = "\ufffd"
_PENDING_TOKENS_MAX = 16
"""Byte-fallback tokens carry one byte each and a character has at most four, so a longer run was never valid text."""


class Detokenizer(Protocol):
    """One per request. `push` returns the text that became certain; `finish` the rest, without a last character that the
    end of the completion cut in half (its bytes were no error of the model, so they must not become U+FFFD)."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class ByteLevelDetokenizer:
    """Each token has fixed bytes, so decoding is an incremental UTF-8 decoder and cannot disagree with the whole text."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        self._decoder.reset()  # what it still holds is by construction a valid beginning of one character
        return ""


class WindowDetokenizer:
    """Decodes the last few tokens together with the ones before them, because a decoder may treat the first token of a text
    differently (it strips a leading space) and joins byte tokens; what still ends in U+FFFD may be half a character and waits."""

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped_token_ids: frozenset[int]) -> None:
        self._decode = decode
        self._skipped_token_ids = skipped_token_ids
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._num_emitted = 0

    def push(self, token_id: int) -> str:
        if token_id in self._skipped_token_ids:
            return ""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        certain = text.rstrip(_REPLACEMENT)
        start = len(self._context_text) + self._num_emitted
        if (len(certain) == len(text) and len(text) > start) or len(self._pending) >= _PENDING_TOKENS_MAX:
            return self._advance(text)
        piece = certain[start:]
        self._num_emitted += len(piece)
        return piece

    def finish(self) -> str:
        if not self._pending:
            return ""
        text = self._decode(self._context + self._pending)
        certain = text.rstrip(_REPLACEMENT)
        is_cut_character = len(text) - len(certain) < 4
        return self._advance(certain if is_cut_character else text)

    def _advance(self, text: str) -> str:
        """Emits all of the window; its new tokens become the context of the next ones."""
        piece = text[len(self._context_text) + self._num_emitted :]
        self._context = self._pending
        self._context_text = self._decode(self._context)
        self._pending = []
        self._num_emitted = 0
        return piece


@dataclass(frozen=True, slots=True)
class StopResult:
    """`text` may go out; `is_stopped` says that a stop string was found right behind it."""

    text: str
    is_stopped: bool


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces, holding back only what could still become one.

    At most `longest stop - 1` characters are held. The stop that is complete first wins (of two, the one that starts
    first), so the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> StopResult:
        if not self._stops:
            return StopResult(piece, False)
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return StopResult(text[: min(found)[1]], True)
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return StopResult(text[: len(text) - num_held], False)

    def release(self, piece: str = "") -> str:
        """All that is held plus `piece`, unmatched: the text ended, or matching is not armed yet."""
        text, self._held = self._held + piece, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
