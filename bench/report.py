"""From the raw turns of `bench.pd` to one table: medians over the rounds with their range, and ours over the best peer. Pure.

Takes the result object as it lies in the JSON file. A value that a side does not have is left out, never guessed; a ratio needs values
on both sides. Latencies are milliseconds, memory MiB, CPU in cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Measure:
    """One row: where its value lies in a turn, and whether more of it is better (None: a side note without a ratio)."""

    title: str
    path: tuple[str, ...]
    more_is_better: bool | None = False
    digits: int = 1


def _load(workload: str, title: str, *names: str) -> list[Measure]:
    known = {
        "tok/s": Measure(f"{title}: output tok/s", ("workloads", workload, "output_tokens_per_s"), True),
        "ttft": Measure(f"{title}: TTFT p50, ms", ("workloads", workload, "ttft_ms", "p50")),
        "tpot": Measure(f"{title}: TPOT p50, ms", ("workloads", workload, "tpot_ms", "p50")),
        "itl99": Measure(f"{title}: ITL p99, ms", ("workloads", workload, "itl_ms", "p99")),
    }
    return [known[name] for name in names]


def _class(label: str) -> list[Measure]:
    where = ("workloads", "mixed", "classes", label)
    return [
        Measure(f"mixed, {label}: TTFT p50, ms", (*where, "ttft_ms", "p50")),
        Measure(f"mixed, {label}: TTFT p99, ms", (*where, "ttft_ms", "p99")),
        Measure(f"mixed, {label}: TPOT p50, ms", (*where, "tpot_ms", "p50")),
        Measure(f"mixed, {label}: ITL p99, ms", (*where, "itl_ms", "p99")),
        Measure(f"mixed, {label}: worst gap of a request, p50, ms", (*where, "worst_gap_ms", "p50")),
        Measure(f"mixed, {label}: worst gap of all, ms", (*where, "worst_gap_ms", "max")),
    ]


MEASURES: tuple[Measure, ...] = (
    *_load("c1", "1 stream, 128/64", "tok/s", "ttft", "tpot", "itl99"),
    *_load("c4", "4 streams, 128/64", "tok/s", "ttft", "tpot", "itl99"),
    *_load("c16", "16 streams, 128/64", "tok/s", "ttft", "tpot", "itl99"),
    *_load("prefill128", "prompt 128, idle", "ttft"),
    *_load("prefill1024", "prompt 1,024, idle", "ttft"),
    *_class("chat"),
    *_class("long"),
    Measure("mixed: output tok/s (set by the arrivals)", ("workloads", "mixed", "output_tokens_per_s"), None),
    Measure("handover of 1,500 tokens, ms", ("workloads", "handover", "handover_ms"), None, 2),
    Measure("handover: transfer alone, ms", ("workloads", "handover", "transfer_ms"), None, 2),
    Measure("handover minus transfer, ms", ("workloads", "handover", "handover_minus_transfer_ms"), None, 2),
    Measure("handover / transfer", ("workloads", "handover", "handover_over_transfer"), None, 2),
    Measure("last prefill chunk to first decode token, ms", ("workloads", "handover", "to_first_decode_token_ms"), None, 2),
    Measure("start to ready, s", ("ready_s",)),
    Measure("resident memory, PSS after the load, MiB", ("memory_end", "pss_mib"), digits=0),
    Measure("resident memory, RSS after the load, MiB", ("memory_end", "rss_mib"), digits=0),
    Measure("idle CPU, busiest process, cores", ("idle", "busiest"), digits=3),
    Measure("idle CPU, all processes, cores", ("idle", "total"), digits=3),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over the best peer of one row."""

    value: float
    peer: str


def value_of(turn: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """The number at `path`, or None where the turn has none."""
    at: Any = turn
    for name in path:
        at = at.get(name) if isinstance(at, Mapping) else None
    return float(at) if isinstance(at, int | float) and not isinstance(at, bool) else None


def values(turns: Sequence[Mapping[str, Any]], side: str, path: Sequence[str]) -> list[float]:
    """The value in each round of one side."""
    found = (value_of(turn, path) for turn in turns if turn["side"] == side)
    return [value for value in found if value is not None]


def cell(numbers: Sequence[float], digits: int) -> str:
    """`median (min–max)`, the median alone for one number."""
    if not numbers:
        return NOTHING
    middle = f"{statistics.median(numbers):,.{digits}f}"
    return middle if len(numbers) == 1 else f"{middle} ({min(numbers):,.{digits}f}–{max(numbers):,.{digits}f})"


def ratio(ours: Sequence[float], peers: Mapping[str, Sequence[float]], more_is_better: bool) -> Ratio | None:
    """The median of ours over the median of the best peer; None when ours or all peers have no value, or the best one is 0."""
    known = {name: statistics.median(numbers) for name, numbers in peers.items() if numbers}
    if not ours or not known:
        return None
    best = (max if more_is_better else min)(known, key=lambda name: known[name])
    return Ratio(statistics.median(ours) / known[best], best) if known[best] else None


def _ratio_cell(result: Ratio | None, num_peers: int) -> str:
    if result is None:
        return NOTHING
    return f"{result.value:.2f}" if num_peers == 1 else f"{result.value:.2f} ({result.peer})"


def render(result: Mapping[str, Any]) -> str:
    """The Markdown table with what a reader must know of the run."""
    turns: list[Mapping[str, Any]] = [turn for turn in result["turns"] if "error" not in turn]
    sides: list[str] = result["settings"]["sides"]
    ours = [side for side in sides if side in result["settings"]["ours"]]
    peers = [side for side in sides if side not in ours]
    rivals: Mapping[str, Sequence[str]] = result["settings"].get("compare", {})
    against = {side: [peer for peer in peers if peer in rivals.get(side, peers)] for side in ours}
    compared = [side for side in ours if against[side]]
    header = [
        "measure",
        *sides,
        *(f"{side} / {'best peer' if len(against[side]) > 1 else against[side][0]}" for side in compared),
    ]
    lines = [*_head(result), "", _row(header), _row(["---"] * len(header))]
    for measure in MEASURES:
        numbers = {side: values(turns, side, measure.path) for side in sides}
        if not any(numbers.values()):
            continue
        ratios = [
            NOTHING
            if measure.more_is_better is None
            else _ratio_cell(
                ratio(numbers[side], {peer: numbers[peer] for peer in against[side]}, measure.more_is_better), len(against[side])
            )
            for side in compared
        ]
        lines.append(_row([measure.title, *(cell(numbers[side], measure.digits) for side in sides), *ratios]))
    blanks = [""] * len(compared)
    lines.append(_row(["failed requests", *(str(_failed(turns, side)) for side in sides), *blanks]))
    lines.append(_row(["CPU share of other programs, worst run", *(_foreign(turns, side) for side in sides), *blanks]))
    return "\n".join([*lines, *_errors(result)]) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(result: Mapping[str, Any]) -> list[str]:
    machine, settings = result["machine"], result["settings"]
    commit = result["commit"] + (" with uncommitted changes" if result["is_dirty"] else "")
    done = len({turn["round"] for turn in result["turns"]})
    head = [
        f"{result['started']}, commit {commit}. {machine['cpu']}, {machine['num_cpus']} cores ({' '.join(machine['vector_flags'])}), "
        f"{machine['memory_gib']} GiB. {settings['model']}, {settings['dtype']}.",
        f"Medians (min–max) of {done} alternating rounds, seed {settings['seed']}; ratios are ours / the best peer's.",
    ]
    if settings["quick"]:
        head.append("**A --quick run: it proves the path and measures nothing.**")
    if done < settings["rounds"] or not result["is_complete"]:
        head.append(f"**Partial: round {done} of {settings['rounds']} was begun, not all sides are in it.**")
    return head


def _failed(turns: Sequence[Mapping[str, Any]], side: str) -> int:
    reports = [report for turn in turns if turn["side"] == side for report in turn["workloads"].values()]
    return sum(sum(report.get("errors", {}).values()) for report in reports)


def _foreign(turns: Sequence[Mapping[str, Any]], side: str) -> str:
    reports = [report for turn in turns if turn["side"] == side for report in turn["workloads"].values()]
    shares = [report["foreign_cpu_share"] for report in reports if "foreign_cpu_share" in report]
    return f"{max(shares):.2f}" if shares else NOTHING


def _errors(result: Mapping[str, Any]) -> list[str]:
    lines = [f"- round {turn['round'] + 1}, {turn['side']}: {turn['error']}" for turn in result["turns"] if "error" in turn]
    lines += [
        f"- round {turn['round'] + 1}, {turn['side']}: {report['failed']}"
        for turn in result["turns"]
        for report in turn.get("workloads", {}).values()
        if "failed" in report
    ]
    return ["", "Went wrong:", *lines] if lines else []
