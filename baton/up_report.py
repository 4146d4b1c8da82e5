"""What `baton up` prints once the fleet is ready: the self-check's answer, its timeline, how to reach the server.

Knows the console only; raises what the self-check raises and decides nothing.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from rich.console import Console
from rich.text import Text

from baton.openai_stream import StreamFailed
from baton.self_check import PROMPT, run_self_check
from baton.timeline_text import timeline_rows


async def show_self_check(console: Console, url: str, model: str, *, wants_handoff: bool, api_key: str = "") -> None:
    """Streams one answer to the console and shows the request's timeline. `api_key`: for a router that wants one.

    Raises StreamFailed; also when `wants_handoff` and the answer came without one, because then the path was not proved.
    """
    console.print(f"\nself-check: {PROMPT}\n", style="bold", markup=False, highlight=False)
    result = await run_self_check(
        url, model, lambda text: console.print(text, end="", markup=False, highlight=False, soft_wrap=True), api_key=api_key
    )
    console.print("\n")
    for label, value in timeline_rows(result.timeline, result.tokens_per_s):
        console.print(Text.assemble((f"{label:<18}", "dim"), value), soft_wrap=True)
    if wants_handoff and not result.timeline.get("handoff"):
        mode, reason = result.timeline.get("mode"), result.timeline.get("placement_reason")
        raise StreamFailed("no handoff", f"the answer did not use a prefill and a decode worker (mode {mode}: {reason})")


def show_address(console: Console, url: str, model: str, log_folder: Path) -> None:
    """The last lines before serving: address, a request to copy, logs, how to stop."""
    body = json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello"}]})
    curl = f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    console.print(f"\nserving {model} at {url}", markup=False, highlight=False)
    for line in (curl, f"logs in {log_folder}", "Ctrl-C (or `baton down`) stops everything"):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
