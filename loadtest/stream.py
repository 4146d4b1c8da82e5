"""Sends one request over HTTP and feeds its event stream to a meter, each line at the moment it arrives.

Blocking code: under locust gevent has patched the sockets, so each user waits alone. Every failure becomes an outcome with an error;
what the caller itself throws into the greenlet (the end of the run) passes through.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from baton.bench_prompts import words_for
from baton.openai_stream import PATHS, StreamFailed, failure_of_body, request_body
from loadtest.measure import CUT, Outcome, StreamMeter
from loadtest.workloads import PromptKey, make_text

PROBE_WORDS = (12, 48)
PROBE_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how to ask it. `root` is its URL without /v1."""

    root: str
    model: str
    timeout_s: float
    wants_timeline: bool = False
    api_key: str = ""

    def client(self) -> httpx.Client:
        """One connection of one user; the read timeout also ends a stream that has stopped without closing."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(timeout=self.timeout_s, headers=headers, trust_env=False)


def send(
    client: httpx.Client,
    target: Target,
    label: str,
    prompt: str,
    num_tokens: int,
    on_piece: Callable[[bool, float], None] = lambda is_first, gap_s: None,
) -> Outcome:
    """One streaming chat request for exactly `num_tokens` tokens. `on_piece(is_first, gap_s)` is called for each piece of text."""
    extras: dict[str, object] = {"temperature": 0.0, "ignore_eos": True}
    if target.wants_timeline:
        extras["timeline"] = True
    body = request_body("chat", target.model, prompt, num_tokens, **extras)
    meter = StreamMeter(label, num_tokens, time.monotonic())
    deadline_s = meter.sent_s + target.timeout_s
    error = detail = ""
    try:
        with client.stream("POST", target.root + PATHS["chat"], json=body) as reply:
            if reply.status_code != 200:
                raise failure_of_body(reply.read(), reply.status_code)
            for line in reply.iter_lines():
                now_s = time.monotonic()
                if now_s > deadline_s:
                    raise httpx.ReadTimeout("the request as a whole took too long")
                is_first = not meter.piece_times_s
                gap_s = meter.feed(line, now_s)
                if gap_s is not None:
                    on_piece(is_first, gap_s)
    except StreamFailed as failure:
        error, detail = failure.kind, failure.message
    except httpx.TimeoutException:
        error = f"no end within {target.timeout_s:g} s"
    except (httpx.RemoteProtocolError, httpx.ReadError) as failure:
        error = CUT if meter.piece_times_s else type(failure).__name__
    except httpx.HTTPError as failure:
        error = type(failure).__name__
    return meter.end(time.monotonic(), error, detail)


class TargetFailed(Exception):
    """The server cannot be measured; a line for the user."""


def calibrate(client: httpx.Client, target: Target) -> Callable[[int], int]:
    """Two small requests that measure tokens per word. The function returned gives the words for a number of prompt tokens.

    Raises TargetFailed when the server does not answer them in full.
    """
    probes: list[tuple[int, int]] = []
    for num_words in PROBE_WORDS:
        outcome = send(client, target, "probe", make_text(0, "probe", PromptKey(0, 0, num_words), num_words), PROBE_TOKENS)
        record = outcome.record
        if record.error:
            raise TargetFailed(f"{target.root} did not answer a first small request: {record.error} {outcome.detail}".rstrip())
        probes.append((num_words, record.num_prompt_tokens))
    both = (probes[0], probes[1])
    try:
        words_for(1, both)
    except ValueError as error:
        raise TargetFailed(str(error)) from error
    return lambda num_tokens: words_for(num_tokens, both)
