"""The table: medians with their range, ratios in the right direction, and honesty about what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from bench.report import cell, ratio, render, value_of


def turn(round_index: int, side: str, tokens_per_s: float, ttft_ms: float, **more: Any) -> dict[str, Any]:
    load = {
        "output_tokens_per_s": tokens_per_s,
        "ttft_ms": {"p50": ttft_ms},
        "errors": {},
        "foreign_cpu_share": 0.01 * round_index,
    }
    return {"round": round_index, "side": side, "ready_s": None, "workloads": {"c4": load}, **more}


def result(turns: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    return {
        "started": "2026-01-02 03:04 UTC", "commit": "abc", "is_dirty": False, "is_complete": True, "turns": turns,
        "machine": {"cpu": "CPU X", "num_cpus": 2, "vector_flags": ["avx2"], "memory_gib": 24.0},
        "settings": {
            "sides": ["pd", "one", "two"], "ours": {"pd": ""}, "compare": {}, "model": "m", "dtype": "bfloat16", "seed": 1,
            "rounds": 3, "quick": False, **settings,
        },
    }  # fmt: skip


THREE_ROUNDS = [
    made
    for index in range(3)
    for made in (turn(index, "pd", 90.0 + 10 * index, 50), turn(index, "one", 50, 100), turn(index, "two", 80, 400))
]


def row(text: str, start: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [part.strip() for part in line.strip("|").split("|")]


def test_a_cell_is_the_median_with_its_range() -> None:
    assert cell([3.0, 1.0, 2.0], 1) == "2.0 (1.0–3.0)"
    assert cell([1234.5], 0) == "1,234"
    assert cell([], 1) == "–"


def test_the_best_peer_is_the_fastest_or_the_one_with_the_least_latency() -> None:
    peers = {"one": [50.0, 60.0, 55.0], "two": [80.0, 20.0, 70.0], "absent": []}
    fast = ratio([140.0, 140.0], peers, more_is_better=True)
    assert fast is not None and (fast.value, fast.peer) == (2.0, "two")
    short = ratio([11.0], peers, more_is_better=False)
    assert short is not None and (short.value, short.peer) == (pytest.approx(0.2), "one")


def test_no_ratio_without_values_on_both_sides() -> None:
    assert ratio([], {"one": [1.0]}, True) is None
    assert ratio([1.0], {"one": []}, True) is None
    assert ratio([1.0], {"one": [0.0]}, True) is None


def test_rows_name_the_best_peer_of_each_measure() -> None:
    text = render(result(THREE_ROUNDS))
    assert row(text, "measure")[1:] == ["pd", "one", "two", "pd / best peer"]
    assert row(text, "4 streams, 128/64: output") == ["4 streams, 128/64: output tok/s", "100.0 (90.0–110.0)", "50.0 (50.0–50.0)",
                                                      "80.0 (80.0–80.0)", "1.25 (two)"]  # fmt: skip
    assert row(text, "4 streams, 128/64: TTFT p50")[-1] == "0.50 (one)"
    assert row(text, "CPU share")[1] == "0.02"
    assert "Partial" not in text and "Went wrong" not in text


def test_a_side_may_be_compared_with_named_peers_only() -> None:
    text = render(result(THREE_ROUNDS, compare={"pd": ["two"]}))
    assert row(text, "measure")[-1] == "pd / two"
    assert row(text, "4 streams, 128/64: TTFT p50")[-1] == "0.12"


def test_measures_that_no_side_has_are_no_rows() -> None:
    assert "16 streams" not in render(result(THREE_ROUNDS))


def test_failures_and_missing_rounds_are_said() -> None:
    broken = turn(1, "one", 50, 100)
    broken["workloads"]["c4"]["errors"] = {"HTTP 500": 2}
    broken["workloads"]["c1"] = {"failed": "c1: no request was answered"}
    turns = [turn(0, "pd", 1, 1), {"round": 0, "side": "two", "error": "did not become ready"}, broken]
    text = render(result(turns) | {"is_complete": False, "is_dirty": True})
    assert row(text, "failed requests") == ["failed requests", "0", "2", "0", ""]
    assert "round 2 of 3 was begun" in text
    assert "abc with uncommitted changes" in text
    assert "- round 1, two: did not become ready" in text
    assert "- round 2, one: c1: no request was answered" in text
    assert row(text, "4 streams, 128/64: output")[3] == "–", "a failed turn has no numbers"


def test_a_quick_run_says_that_it_measures_nothing() -> None:
    assert "measures nothing" in render(result(THREE_ROUNDS, quick=True))
    assert "measures nothing" not in render(result(THREE_ROUNDS))


def test_values_are_numbers_or_missing() -> None:
    assert value_of({"a": {"b": 3}}, ("a", "b")) == 3.0
    assert value_of({"a": None}, ("a", "b")) is None
    assert value_of({"a": {"b": True}}, ("a", "b")) is None
