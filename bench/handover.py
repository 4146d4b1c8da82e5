"""What the handover of one long prompt costs, read from the request's own timeline.

Sends prompts of `--prompt-tokens` random token ids, one at a time, to a router with one prefill and one decode worker on this host, and
prints the median over `--repeats`: bytes and frames moved, the data plane's own time for those bytes, and the time from prefill's last
computed chunk to the commit on decode (the sequence joins the next step). Both workers must run on one host: their clocks are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics

import httpx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    rows = []
    for _ in range(arguments.repeats):
        prompt = [rng.randrange(1000, 40000) for _ in range(arguments.prompt_tokens)]
        body = {
            "model": arguments.model,
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "timeline": True,
        }
        reply = httpx.post(f"{arguments.url}/v1/completions", json=body, timeout=300)
        reply.raise_for_status()
        timeline = reply.json()["baton"]
        handoff = timeline["handoff"]
        if handoff is None:
            raise SystemExit(f"the request was not handed over: mode {timeline['mode']}, {timeline['placement_reason']}")
        rows.append(
            {
                "transport": timeline["transport"],
                "bytes": handoff["num_bytes"],
                "frames": handoff["num_frames"],
                "chunks": timeline["prefill"]["num_chunks"],
                "prefill_ms": 1e3 * timeline["stages"]["prefill"],
                "transfer_ms": 1e3 * handoff["stages"]["transfer"],
                "scatter_ms": 1e3 * handoff["stages"]["scatter"],
                "handover_ms": 1e3 * handoff["handover_s"],
                "first_decode_step_ms": 1e3 * handoff["stages"]["first_decode"],
            }
        )
        print(json.dumps(rows[-1]))
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "transport"}
    medians["handover / transfer"] = statistics.median(row["handover_ms"] / row["transfer_ms"] for row in rows)
    print("median", json.dumps({key: round(value, 3) for key, value in medians.items()}))


if __name__ == "__main__":
    main()
