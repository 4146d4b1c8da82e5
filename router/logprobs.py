"""Log-probabilities of a completion's tokens as clients see them: text, bytes, alternatives, in the shapes of both endpoints.

Joins what workers report by token index with the text the router makes of the tokens; each token is given out once, in order. Pure; it
knows no streams. Natural logarithms; offsets are characters of the completion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import Internal
from common.types import TokenLogprobs

LOGPROB_MIN = -9999.0
"""JSON has no infinity: a token that the model excludes entirely gets this, as clients of this API expect."""


@dataclass(frozen=True, slots=True)
class NamedToken:
    """A token by what it stands for; `text` of bytes that are no UTF-8 by themselves is `bytes:` with their escapes.

    `logprob` None: nothing came before the token that could have made it likely (the first one of a prompt).
    """

    text: str
    data: bytes
    logprob: float | None


@dataclass(frozen=True, slots=True)
class RatedToken:
    """One completion token; `offset` is where its text begins, `top` are the most likely alternatives, most likely first."""

    token: NamedToken
    offset: int
    top: tuple[NamedToken, ...]


class TokenNames(Protocol):
    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class PromptRatings:
    """The logprobs of a prompt's tokens, as an attempt reports them; a new attempt starts over."""

    def __init__(self) -> None:
        self._noted: list[TokenLogprobs] = []

    def begin_attempt(self) -> None:
        self._noted.clear()

    def note(self, first_position: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Raises Internal for a gap or a repetition: each position comes once, in order."""
        if first_position != len(self._noted) + 1:
            raise Internal(f"logprobs of prompt position {first_position} came, {len(self._noted) + 1} was due")
        self._noted.extend(logprobs)

    def take(self, token_ids: Sequence[int], offsets: Sequence[int], names: TokenNames) -> tuple[RatedToken, ...]:
        """All tokens of the prompt. Raises Internal if a worker left some out."""
        if len(self._noted) != len(token_ids) - 1:
            raise Internal(f"the worker rated {len(self._noted)} of {len(token_ids) - 1} prompt tokens")
        first = RatedToken(NamedToken(names.token_text(token_ids[0]), names.token_bytes(token_ids[0]), None), offsets[0], ())
        rest = zip(token_ids[1:], offsets[1:], self._noted, strict=True)
        return (first, *(rated_token(names, token_id, offset, value) for token_id, offset, value in rest))


class Ratings:
    """The logprobs of one completion. `note` takes them as they arrive, in any order; `take` gives them out in index order."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._noted: dict[int, TokenLogprobs] = {}
        self._next_index = 0

    def note(self, first_index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        for index, value in enumerate(logprobs, first_index):
            if index >= self._next_index:  # a repeated token was given out already
                self._noted[index] = value

    def take(self, token_ids: Sequence[int], offsets: Sequence[int]) -> tuple[RatedToken, ...]:
        """The next tokens of the completion. Raises Internal if a worker did not rate one."""
        rated = []
        for token_id, offset in zip(token_ids, offsets, strict=True):
            value = self._noted.pop(self._next_index, None)
            if value is None:
                raise Internal(f"the worker sent no logprobs of completion token {self._next_index}")
            self._next_index += 1
            rated.append(rated_token(self._names, token_id, offset, value))
        return tuple(rated)


def rated_token(names: TokenNames, token_id: int, offset: int, value: TokenLogprobs) -> RatedToken:
    top = tuple(_named(names, other, logprob) for other, logprob in value.top)
    return RatedToken(_named(names, token_id, value.logprob), offset, top)


def _named(names: TokenNames, token_id: int, logprob: float) -> NamedToken:
    shown = logprob if math.isfinite(logprob) else LOGPROB_MIN
    return NamedToken(names.token_text(token_id), names.token_bytes(token_id), shown)


def completion_logprobs(tokens: Sequence[RatedToken]) -> dict[str, Any]:
    """`logprobs` of a /v1/completions choice. The token itself is among its alternatives, as that endpoint has it."""
    return {
        "tokens": [rated.token.text for rated in tokens],
        "token_logprobs": [rated.token.logprob for rated in tokens],
        "top_logprobs": [
            None if rated.token.logprob is None else {other.text: other.logprob for other in (*rated.top, rated.token)}
            for rated in tokens
        ],
        "text_offset": [rated.offset for rated in tokens],
    }


def chat_logprobs(tokens: Sequence[RatedToken]) -> dict[str, Any]:
    """`logprobs` of a chat choice or of a chunk."""
    content = [_chat_token(rated.token) | {"top_logprobs": [_chat_token(other) for other in rated.top]} for rated in tokens]
    return {"content": content, "refusal": None}


def _chat_token(token: NamedToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}
