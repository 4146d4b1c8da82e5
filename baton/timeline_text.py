"""The router's timeline of one request, in words and in the order in which things happened. Pure.

Takes the JSON object that the router adds to the response on request; missing parts are left out rather than guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STAGE_NAMES = {
    "tokenise": "tokenised",
    "admit": "admitted",
    "place": "placed",
    "dispatch": "dispatched",
    "prefill_queue": "queued at prefill",
    "prefill": "prefill computed",
    "first_token_out": "first token sent",
}


def timeline_rows(timeline: Mapping[str, Any], tokens_per_s: float) -> list[tuple[str, str]]:
    """(label, value) pairs. `tokens_per_s` is what the client measured, 0 when it could not."""
    rows: list[tuple[str, str]] = []
    route = " → ".join(str(timeline[key]) for key in ("prefill_worker", "decode_worker") if timeline.get(key))
    if route:
        rows.append(("route", f"{route} ({timeline.get('mode')})"))
    stages = _mapping(timeline, "stages")
    for key, label in _STAGE_NAMES.items():
        if isinstance(stages.get(key), int | float):
            rows.append((label, milliseconds(stages[key])))
    if isinstance(timeline.get("ttft_s"), int | float):
        rows.append(("first token after", milliseconds(timeline["ttft_s"])))
    handoff = _mapping(timeline, "handoff")
    if handoff:
        rows.append(("KV moved", _moved(timeline, handoff)))
    elif timeline:
        rows.append(("KV moved", "nothing: computed where it was decoded"))
    if tokens_per_s > 0:
        rows.append(("decode", f"{tokens_per_s:.1f} tokens/s"))
    return rows


def _moved(timeline: Mapping[str, Any], handoff: Mapping[str, Any]) -> str:
    size, frames = byte_count(int(handoff.get("num_bytes") or 0)), _counted(handoff.get("num_frames"), "frame")
    text = f"{size} in {frames} over {timeline.get('transport')}"
    stages = _mapping(handoff, "stages")
    if isinstance(stages.get("transfer"), int | float):
        text += f", transfer {milliseconds(stages['transfer'])}"
    if isinstance(stages.get("scatter"), int | float):
        text += f", scatter {milliseconds(stages['scatter'])}"
    if handoff.get("num_cached_tokens"):
        text += f"; {handoff['num_cached_tokens']} tokens were there already"
    return text


def _counted(count: object, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _mapping(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, Mapping) else {}


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def byte_count(num_bytes: int) -> str:
    """1536 → `1.5 KiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
