"""What the handover of one long prompt costs, read from the request's own timeline.

Sends prompts of random token ids, one at a time, to a router with one prefill and one decode worker on this host: bytes and frames
moved, the data plane's own time for those bytes, and the time from prefill's last computed chunk to the commit on decode (the sequence
joins the next step). Both workers must run on one host, because their clocks are compared; all times here are milliseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from typing import Any

import httpx

Row = dict[str, float | str]


class NoHandover(Exception):
    """The answer says that nothing was handed over, or not how long it took."""


def measure(client: httpx.Client, url: str, model: str, prompt: Sequence[int]) -> Row:
    """One request. Raises NoHandover, and httpx.HTTPError for a server that does not answer."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "timeline": True,
    }
    reply = client.post(f"{url}/v1/completions", json=body)
    reply.raise_for_status()
    return row_of(reply.json().get("baton") or {})


def row_of(timeline: dict[str, Any]) -> Row:
    """The measures in one timeline. Raises NoHandover."""
    handoff = timeline.get("handoff")
    if handoff is None:
        raise NoHandover(f"the request was not handed over: mode {timeline.get('mode')}, {timeline.get('placement_reason')}")
    if handoff["handover_s"] is None:
        raise NoHandover("the router could not compare the workers' clocks: do both run on one host?")
    transfer_ms = 1e3 * handoff["stages"]["transfer"]
    handover_ms = 1e3 * handoff["handover_s"]
    first_decode_ms = 1e3 * handoff["stages"]["first_decode"]
    return {
        "transport": str(timeline["transport"]),
        "bytes": handoff["num_bytes"],
        "frames": handoff["num_frames"],
        "chunks": timeline["prefill"]["num_chunks"],
        "prefill_ms": 1e3 * timeline["stages"]["prefill"],
        "transfer_ms": transfer_ms,
        "scatter_ms": 1e3 * handoff["stages"]["scatter"],
        "handover_ms": handover_ms,
        "first_decode_step_ms": first_decode_ms,
        "to_first_decode_token_ms": handover_ms + first_decode_ms,
        "handover_minus_transfer_ms": handover_ms - transfer_ms,
        "handover_over_transfer": handover_ms / transfer_ms if transfer_ms else 0.0,
    }


def medians(rows: Sequence[Row]) -> dict[str, float]:
    """The median of each number over the rows."""
    numbers = [{key: value for key, value in row.items() if not isinstance(value, str)} for row in rows]
    return {key: round(statistics.median(row[key] for row in numbers), 3) for key in numbers[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    rows = []
    with httpx.Client(timeout=300, trust_env=False) as client:
        for _ in range(arguments.repeats):
            prompt = [generator.randrange(1000, 40000) for _ in range(arguments.prompt_tokens)]
            try:
                rows.append(measure(client, arguments.url, arguments.model, prompt))
            except NoHandover as error:
                raise SystemExit(str(error)) from error
            print(json.dumps(rows[-1]))
    print("median", json.dumps(medians(rows)))


if __name__ == "__main__":
    main()
