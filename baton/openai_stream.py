"""Reads the server-sent events of an OpenAI-compatible completion server; shared by the self-check, `chat` and `bench`.

Owns the two request shapes (chat, completions) and the parsing of one event line; it knows no socket and keeps no state, so the
callers choose a blocking or an asyncio client. Text pieces are what the server put into one chunk, which may be several tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Endpoint = Literal["chat", "completions"]

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class StreamFailed(Exception):
    """The server answered with an error, before or inside the stream. `kind` is its error type or the HTTP status."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the server reports them."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of the stream. `raw` is the whole JSON object, for fields beyond OpenAI's."""

    text: str
    finish_reason: str | None
    usage: Usage | None
    raw: Mapping[str, Any]


def base_url(url: str) -> str:
    """The server's root: a trailing slash and a trailing /v1 are taken off, so that both spellings work."""
    return url.rstrip("/").removesuffix("/v1")


def request_body(
    endpoint: Endpoint,
    model: str,
    prompt: str | Sequence[int] | Sequence[Mapping[str, str]],
    max_tokens: int,
    **options: object,
) -> dict[str, object]:
    """The JSON body of a streaming request that asks for usage.

    `prompt` is a text, for completions also token ids, for chat also the list of messages.
    """
    body: dict[str, object] = {
        "model": model,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint == "completions":
        body["prompt"] = prompt
    elif isinstance(prompt, str):
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["messages"] = list(prompt)
    return body | options


def parse_event(line: str, endpoint: Endpoint) -> Chunk | None:
    """One line of the stream. None for blank lines, comments, other fields and the closing `[DONE]`.

    Raises StreamFailed for an error event and for data that is not a JSON object.
    """
    if not line.startswith("data:"):
        return None
    data = line[len("data:") :].strip()
    if not data or is_done(line):
        return None
    try:
        payload = json.loads(data)
    except json.JSONDecodeError as error:
        raise StreamFailed("invalid_stream", f"event is not JSON ({error}): {data[:80]!r}") from error
    if not isinstance(payload, dict):
        raise StreamFailed("invalid_stream", f"event is a {type(payload).__name__}, not an object: {data[:80]!r}")
    if payload.get("error"):
        raise failure_of(payload, status=0)
    return Chunk(_text(payload, endpoint), _finish_reason(payload), _usage(payload), payload)


def is_done(line: str) -> bool:
    """True for the line that closes a stream as OpenAI's servers do."""
    return line.startswith("data:") and line[len("data:") :].strip() == "[DONE]"


def failure_of(payload: object, status: int) -> StreamFailed:
    """Makes one exception of an error body (OpenAI's shape, or anything else) and the HTTP status (0 inside a stream)."""
    error = payload.get("error") if isinstance(payload, dict) else None
    label = f"HTTP {status}" if status else "stream error"
    if isinstance(error, dict):
        kind = str(error.get("type") or error.get("code") or label)
        return StreamFailed(f"{label} {kind}" if status else kind, str(error.get("message", "")))
    return StreamFailed(label, str(error or payload)[:200])


def failure_of_body(body: bytes, status: int) -> StreamFailed:
    """The same for a response body that was read whole."""
    try:
        payload: object = json.loads(body)
    except ValueError:
        payload = body.decode(errors="replace")
    return failure_of(payload, status)


def _first_choice(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = payload.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _text(payload: Mapping[str, Any], endpoint: Endpoint) -> str:
    choice = _first_choice(payload)
    text = (choice.get("delta") or {}).get("content") if endpoint == "chat" else choice.get("text")
    return text if isinstance(text, str) else ""


def _finish_reason(payload: Mapping[str, Any]) -> str | None:
    reason = _first_choice(payload).get("finish_reason")
    return reason if isinstance(reason, str) else None


def _usage(payload: Mapping[str, Any]) -> Usage | None:
    usage = payload.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0), int(details.get("cached_tokens") or 0)
    )
