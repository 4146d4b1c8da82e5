"""OpenAI's response shapes as plain dictionaries and bytes: full responses, stream chunks, errors.

Knows nothing of how the text came to be. One error table, two renderings: an HTTP body and an SSE event. JSON goes out as UTF-8, except
errors, which may quote a client's lone surrogate and are therefore ASCII with escapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from common.errors import BatonError
from router.logprobs import RatedToken, chat_logprobs, completion_logprobs
from router.output import Ended, TextDelta, Usage
from router.request import Endpoint, ValidRequest

SSE_KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, and proxies see that the stream lives."""


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


class WholeChoice:
    """One choice of an unstreamed answer as its items come."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.rated: list[RatedToken] = []
        self.ended: Ended | None = None

    def add(self, item: TextDelta | Ended) -> None:
        if isinstance(item, Ended):
            self.ended = item
        else:
            self._pieces.append(item.text)
            self.rated += item.rated

    @property
    def text(self) -> str:
        return "".join(self._pieces)


def full_response(request: ValidRequest, created: int, choices: Sequence[WholeChoice], usage: Usage) -> dict[str, Any]:
    """Of choices that have all ended, in the order of their indexes."""
    response = {
        "id": request.request_id,
        "object": request.endpoint.value,
        "created": created,
        "model": request.model,
        "choices": [_choice(request, index, choice) for index, choice in enumerate(choices)],
        "usage": usage_object(usage),
    }
    if request.wants_timeline and choices[0].ended is not None:
        response["baton"] = choices[0].ended.timeline
    return response


def _choice(request: ValidRequest, index: int, choice: WholeChoice) -> dict[str, Any]:
    assert choice.ended is not None
    shown = {
        "index": index,
        "finish_reason": choice.ended.finish_reason.value,
        "logprobs": _logprobs(request, choice.rated),
    }
    if request.endpoint is Endpoint.CHAT:
        return shown | {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
    return shown | {"text": choice.text}


class ChunkWriter:
    """The SSE events of one stream, each with an id (request id and number from 0). With usage asked for, every chunk carries `usage`
    (null until the last)."""

    def __init__(self, request: ValidRequest, created: int) -> None:
        self._request = request
        self._num_events = 0
        self._head = {
            "id": request.request_id,
            "object": request.endpoint.chunk_object,
            "created": created,
            "model": request.model,
        }
        self._is_chat = request.endpoint is Endpoint.CHAT
        self._tail: dict[str, Any] = {"usage": None} if request.include_usage else {}

    def start(self) -> bytes:
        """The first event: for chat the role, for completions nothing."""
        return self._chunk(0, {"role": "assistant", "content": ""}, None) if self._is_chat else b""

    def text(self, index: int, text: str, rated: Sequence[RatedToken] = ()) -> bytes:
        if not text and not rated:
            return b""
        logprobs = _logprobs(self._request, rated) if rated else None
        return self._chunk(index, {"content": text} if self._is_chat else text, None, logprobs=logprobs)

    def end(self, index: int, ended: Ended) -> bytes:
        """The chunk with the finish reason of a choice."""
        extra = {"baton": ended.timeline} if self._request.wants_timeline else {}
        return self._chunk(index, {} if self._is_chat else "", ended.finish_reason.value, extra)

    def done(self, usage: Usage) -> bytes:
        """After the end of every choice: the usage chunk when asked for, and the end marker."""
        if not self._request.include_usage:
            return self._done()
        return self._event({**self._head, "choices": [], "usage": usage_object(usage)}) + self._done()

    def error(self, error: BatonError) -> bytes:
        """The one error event after which the stream ends."""
        return self._event(error_object(error, self._request.request_id), ascii_only=True) + self._done()

    def _chunk(
        self,
        index: int,
        content: dict[str, str] | str,
        finish_reason: str | None,
        extra: dict[str, Any] | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta" if self._is_chat else "text": content,
            "finish_reason": finish_reason,
            "logprobs": logprobs,
        }
        return self._event({**self._head, "choices": [choice], **self._tail, **(extra or {})})

    def _event(self, value: dict[str, Any], *, ascii_only: bool = False) -> bytes:
        return self._id() + b"data: " + json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":")).encode() + b"\n\n"

    def _done(self) -> bytes:
        return self._id() + b"data: [DONE]\n\n"

    def _id(self) -> bytes:
        self._num_events += 1
        return f"id: {self._request.request_id}/{self._num_events - 1}\n".encode()


def _logprobs(request: ValidRequest, rated: Sequence[RatedToken]) -> dict[str, Any] | None:
    if request.num_logprobs is None:
        return None
    return chat_logprobs(rated) if request.endpoint is Endpoint.CHAT else completion_logprobs(rated)


def error_object(error: BatonError, request_id: str) -> dict[str, Any]:
    rule = error.rule
    return {
        "error": {
            "message": error.message,
            "type": rule.openai_type,
            "param": error.param,
            "code": error.code or _code_of(error.kind),
            "kind": error.kind,
            "request_id": request_id,
        }
    }


def error_headers(error: BatonError) -> dict[str, str]:
    """Retry-After in whole seconds for refusals that a later try may pass."""
    if error.rule.http_status in (429, 503):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s or 1.0)))}
    return {}


def _code_of(kind: str) -> str:
    """InvalidRequest → invalid_request."""
    return "".join(f"_{char.lower()}" if char.isupper() and index else char.lower() for index, char in enumerate(kind))
