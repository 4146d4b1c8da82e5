"""The statistics of a run, apart from locust's: every outcome, the summary as one JSON object, and the verdict. Pure but for `write`.

Holds all piece times of a run (a float per token), so its numbers are exact percentiles, where locust's are rounded; latencies are
those of requests that were answered in full. Inputs are seconds, the summary's latencies milliseconds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from baton.bench_stats import RequestRecord, distribution_ms, summarize
from loadtest.measure import Outcome


@dataclass(slots=True)
class ClientCost:
    """What the load generator itself used: CPU seconds, and how late its loop woke up, which is how late an event may be timed."""

    cpu_s: float = 0.0
    lateness_s: list[float] = field(default_factory=list)

    def add(self, other: ClientCost) -> None:
        self.cpu_s += other.cpu_s
        self.lateness_s += other.lateness_s


@dataclass(slots=True)
class Results:
    """One run. `num_abandoned`: requests that were running when the run ended and that we, not the server, cut off."""

    outcomes: list[Outcome] = field(default_factory=list)
    num_abandoned: int = 0
    client: ClientCost = field(default_factory=ClientCost)
    problem: str = ""
    """Why nothing could be measured, for example a server that does not answer."""

    def take(self) -> dict[str, Any]:
        """What a locust worker sends to its master: everything collected since the last call, as plain values."""
        sent = {"outcomes": [asdict(one) for one in self.outcomes], "abandoned": self.num_abandoned, "problem": self.problem}
        sent |= {"cpu_s": self.client.cpu_s, "lateness_s": self.client.lateness_s}
        self.outcomes, self.num_abandoned, self.client = [], 0, ClientCost()
        return sent

    def merge(self, sent: Mapping[str, Any]) -> None:
        """The other end of `take`."""
        for one in sent["outcomes"]:
            record = RequestRecord(**{**one["record"], "piece_times_s": tuple(one["record"]["piece_times_s"])})
            self.outcomes.append(Outcome(**{**one, "record": record}))
        self.num_abandoned += sent["abandoned"]
        self.client.add(ClientCost(sent["cpu_s"], list(sent["lateness_s"])))
        self.problem = self.problem or sent["problem"]

    @property
    def num_lost(self) -> int:
        return sum(one.num_lost for one in self.outcomes)

    @property
    def failure_ratio(self) -> float:
        """Failed requests of all that ended; 0 for none."""
        return sum(1 for one in self.outcomes if one.record.error) / len(self.outcomes) if self.outcomes else 0.0

    def verdict(self, failure_ratio_max: float) -> list[str]:
        """Why this run is not good, in words; empty when it is. A run without one ended request proves nothing and is not good."""
        if self.problem:
            return [self.problem]
        reasons = [] if self.outcomes else ["no request has ended"]
        if self.num_lost:
            num_requests = sum(1 for one in self.outcomes if one.num_lost)
            reasons.append(f"{self.num_lost} tokens were lost in {num_requests} requests")
        if self.failure_ratio > failure_ratio_max:
            kinds = ", ".join(f"{count} × {kind}" for kind, count in self.failures().most_common())
            reasons.append(f"{self.failure_ratio:.2%} of the requests failed, {failure_ratio_max:.2%} are allowed: {kinds}")
        return reasons

    def failures(self) -> Counter[str]:
        return Counter(one.record.error for one in self.outcomes if one.record.error)

    def summary(self, settings: Mapping[str, Any], failure_ratio_max: float) -> dict[str, Any]:
        """The JSON object of a run: `all` and each class of requests apart, the client's own cost, the verdict."""
        labels = sorted({one.record.label for one in self.outcomes})
        # Rates of all classes are over the same span: from the first request that was sent to the last that ended.
        records = [one.record for one in self.outcomes]
        wall_s = max(r.ended_s for r in records) - min(r.sent_s for r in records) if records else 0.0
        lateness_ms = distribution_ms(self.client.lateness_s)
        return {
            "settings": dict(settings),
            "verdict": self.verdict(failure_ratio_max),
            "all": _summary(self.outcomes, wall_s),
            "classes": {label: _summary([one for one in self.outcomes if one.record.label == label], wall_s) for label in labels},
            "abandoned": self.num_abandoned,
            "client": {
                "cpu_s": round(self.client.cpu_s, 3),
                "core_share": round(self.client.cpu_s / wall_s, 4) if wall_s else None,
                "lateness_ms": lateness_ms,
            },
        }


def _summary(outcomes: Sequence[Outcome], wall_s: float) -> dict[str, Any]:
    report = summarize([one.record for one in outcomes], wall_s)
    answered = [one for one in outcomes if not one.record.error]
    report["failures"] = sum(1 for one in outcomes if one.record.error)
    report["tokens_asked"] = sum(one.num_asked for one in answered)
    report["tokens_lost"] = sum(one.num_lost for one in outcomes)
    report["modes"] = dict(Counter(one.mode for one in answered if one.mode))
    return report


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replaces the file in one step. Raises OSError."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(value, indent=1) + "\n")
    draft.replace(path)
