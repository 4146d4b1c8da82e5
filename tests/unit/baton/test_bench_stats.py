"""The arithmetic of a bench report, on hand-made records."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench_prompts import make_prompts, words_for
from baton.bench_stats import RequestRecord, distribution_ms, percentile, summarize


def record(sent_s: float, times_s: tuple[float, ...], num_tokens: int, error: str = "") -> RequestRecord:
    return RequestRecord(sent_s, times_s[-1] + 0.001 if times_s else sent_s + 1, times_s, 10, num_tokens, 4, error)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0, 50, 90, 95, 99, 100]))
def test_percentiles_are_those_of_numpy(values: list[float], percent: int) -> None:
    assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)), rel=1e-9, abs=1e-9)


def test_a_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError):
        percentile([], 50)


def test_tpot_uses_the_servers_tokens_not_the_pieces() -> None:
    one = record(0.0, (1.0, 2.0), num_tokens=5)  # 5 tokens arrived in two pieces
    assert one.ttft_s == 1.0
    assert one.tpot_s == 0.25


def test_a_single_token_has_no_tpot() -> None:
    assert record(0.0, (1.0,), num_tokens=1).tpot_s is None


def test_rates_are_over_the_wall_time_and_errors_count_in_nothing_else() -> None:
    records = [record(0.0, (0.5, 1.0, 1.5), 3), record(0.2, (0.9, 1.0), 2), record(0.0, (), 0, "ReadError")]
    report = summarize(records, wall_s=2.0)
    assert report["answered"] == 2 and report["errors"] == {"ReadError": 1}
    assert report["output_tokens_per_s"] == 2.5
    assert report["total_tokens_per_s"] == 12.5
    assert report["requests_per_s"] == 1.0
    assert report["cached_tokens"] == 8
    assert report["ttft_ms"]["mean"] == pytest.approx(600)
    assert report["itl_ms"]["max"] == pytest.approx(500)


def test_no_answer_at_all_gives_no_latency() -> None:
    report = summarize([record(0.0, (), 0, "ReadError")], wall_s=1.0)
    assert report["ttft_ms"] is None and report["output_tokens_per_s"] == 0.0


def test_distributions_are_in_milliseconds() -> None:
    assert distribution_ms([0.001, 0.003]) == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p95": 2.9, "p99": 2.98, "max": 3.0}


def test_the_prompt_length_is_steered_by_two_probes() -> None:
    assert words_for(100, ((10, 7 + 20), (50, 7 + 100))) == round(93 / 2)
    assert words_for(1, ((10, 27), (50, 107))) == 1


def test_counts_that_do_not_grow_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot steer"):
        words_for(100, ((10, 5), (50, 5)))


def test_prompts_are_a_pure_function_of_the_seed() -> None:
    assert make_prompts(3, 5, 40) == make_prompts(3, 5, 40)
    assert len({prompt.split()[0] + prompt.split()[1] for prompt in make_prompts(3, 200, 5)}) == 200
    assert all(len(prompt.split()) == 42 for prompt in make_prompts(3, 5, 40))
