"""The self-check of `baton up`: one streamed answer through the whole path, and the request's timeline in words.

Talks to the router as any client would and asks for the timeline field. Times of the timeline are seconds as the router
reports them; the rate is that of this one stream on the client's side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from baton.openai_stream import PATHS, StreamFailed, Usage, failure_of_body, parse_event, request_body

PROMPT = (
    "In a relay race four runners share one distance. The first runs as fast as she can and hands a baton to the second, who is already "
    "moving when it arrives; a clumsy handover costs more time than any runner can win back, so teams practise it again and again. "
    "The baton must change hands inside a marked zone, and a team that drops it may pick it up and go on. "
    "Explain in two sentences why the handover decides the race."
)
"""Longer than what the router computes on a decode worker alone, so that the answer needs the whole path."""
MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What came back. Times are seconds since the request was sent."""

    text: str
    usage: Usage
    timeline: Mapping[str, Any]
    first_text_s: float
    last_text_s: float

    @property
    def tokens_per_s(self) -> float:
        """Decode rate: tokens after the first over the time they took; 0 when there is only one."""
        elapsed_s = self.last_text_s - self.first_text_s
        return (self.usage.num_completion_tokens - 1) / elapsed_s if elapsed_s > 0 else 0.0


async def run_self_check(
    url: str, model: str, on_text: Callable[[str], None], timeout_s: float = 120.0, api_key: str = ""
) -> SelfCheck:
    """Streams one answer. Raises StreamFailed when the server refuses or the stream ends without text and usage."""
    body = request_body("chat", model, PROMPT, MAX_TOKENS, temperature=0.0, timeline=True)
    pieces: list[str] = []
    times: list[float] = []
    usage: Usage | None = None
    timeline: Mapping[str, Any] = {}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    started_s = time.monotonic()
    try:
        async with (
            httpx.AsyncClient(timeout=timeout_s, trust_env=False, headers=headers) as client,
            client.stream("POST", url + PATHS["chat"], json=body) as reply,
        ):
            if reply.status_code != 200:
                raise failure_of_body(await reply.aread(), reply.status_code)
            async for line in reply.aiter_lines():
                chunk = parse_event(line, "chat")
                if chunk is None:
                    continue
                usage = chunk.usage or usage
                timeline = chunk.raw.get("baton") or timeline
                if chunk.text:
                    pieces.append(chunk.text)
                    times.append(time.monotonic() - started_s)
                    on_text(chunk.text)
    except httpx.HTTPError as error:
        raise StreamFailed("connection", f"{type(error).__name__} {error}".strip()) from error
    if usage is None or not pieces:
        raise StreamFailed(
            "incomplete", f"the stream ended after {len(pieces)} pieces of text, usage {'missing' if usage is None else 'there'}"
        )
    return SelfCheck("".join(pieces), usage, timeline, times[0], times[-1])
