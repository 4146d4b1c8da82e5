"""The arithmetic of `baton bench`: from what each request saw to percentiles and rates. Pure.

TTFT runs from sending the request (in an open loop: from when it was due) to its first piece of text; TPOT is
(last piece - first piece) / (tokens - 1) of one request, with the server's own token count; ITL are the gaps between pieces, pooled;
the worst gap is the longest of each request. All inputs are seconds, all printed latencies milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the client saw it; monotonic seconds. `error` is empty for a request that was answered in full."""

    sent_s: float
    ended_s: float
    piece_times_s: tuple[float, ...]
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    error: str = ""
    due_s: float | None = None
    label: str = ""

    @property
    def start_s(self) -> float:
        """Where its latencies count from: when an open loop's request was due, when a closed loop's was sent."""
        return self.sent_s if self.due_s is None else self.due_s

    @property
    def ttft_s(self) -> float:
        return self.piece_times_s[0] - self.start_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.piece_times_s, self.piece_times_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token: there is no second one to wait for."""
        if self.num_completion_tokens < 2:
            return None
        return (self.piece_times_s[-1] - self.piece_times_s[0]) / (self.num_completion_tokens - 1)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between closest ranks, as numpy's default. Raises ValueError for no values."""
    if not values:
        raise ValueError("a percentile of no values")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution_ms(values_s: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in milliseconds; None for no values."""
    if not values_s:
        return None
    result = {"mean": sum(values_s) / len(values_s)}
    result |= {f"p{percent}": percentile(values_s, percent) for percent in PERCENTILES}
    result["max"] = max(values_s)
    return {name: round(value * 1000, 3) for name, value in result.items()}


def summarize(records: Sequence[RequestRecord], wall_s: float) -> dict[str, Any]:
    """The report of one run that took `wall_s` seconds. Failed requests count as errors and in nothing else."""
    answered = [record for record in records if not record.error]
    completion_tokens = sum(record.num_completion_tokens for record in answered)
    prompt_tokens = sum(record.num_prompt_tokens for record in answered)
    gaps = [record.gaps_s for record in answered]
    return {
        "requests": len(records),
        "answered": len(answered),
        "errors": dict(Counter(record.error for record in records if record.error)),
        "duration_s": round(wall_s, 4),
        "requests_per_s": round(len(answered) / wall_s, 4) if wall_s > 0 else 0.0,
        "output_tokens_per_s": round(completion_tokens / wall_s, 3) if wall_s > 0 else 0.0,
        "total_tokens_per_s": round((completion_tokens + prompt_tokens) / wall_s, 3) if wall_s > 0 else 0.0,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "cached_tokens": sum(record.num_cached_tokens for record in answered),
        "pieces": sum(len(record.piece_times_s) for record in answered),
        "ttft_ms": distribution_ms([record.ttft_s for record in answered]),
        "tpot_ms": distribution_ms([tpot for record in answered if (tpot := record.tpot_s) is not None]),
        "itl_ms": distribution_ms([gap for one in gaps for gap in one]),
        "worst_gap_ms": distribution_ms([max(one) for one in gaps if one]),
        "e2e_ms": distribution_ms([record.ended_s - record.start_s for record in answered]),
    }
