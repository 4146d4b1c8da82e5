"""Open-loop load: Poisson arrivals, and latencies that count from when a request was due."""

from __future__ import annotations

import httpx
import pytest

from baton.bench import BenchOptions, open_loop
from baton.bench_arrivals import Arrival, RequestClass, poisson_arrivals
from baton.bench_stats import RequestRecord, summarize
from tests.unit.baton.fake_openai import FakeOpenAI

CHAT = RequestClass("chat", 5.0, 100, 64)
LONG = RequestClass("long", 0.5, 1500, 8)


def options(url: str) -> BenchOptions:
    return BenchOptions(url, "fake", "completions", 1, 1, 10, 4, seed=1, timeout_s=10.0)


def test_arrivals_have_the_wanted_rate_and_are_in_order() -> None:
    arrivals = poisson_arrivals(3, [CHAT, LONG], 400.0)
    chats = [arrival for arrival in arrivals if arrival.label == "chat"]
    assert len(chats) == pytest.approx(2000, rel=0.1)
    assert len(arrivals) - len(chats) == pytest.approx(200, rel=0.25)
    assert [arrival.due_s for arrival in arrivals] == sorted(arrival.due_s for arrival in arrivals)
    assert all(0 < arrival.due_s < 400 for arrival in arrivals)
    gaps = [later.due_s - earlier.due_s for earlier, later in zip(chats, chats[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.15), "exponential gaps: as wide as their mean"


def test_arrivals_depend_on_the_seed_alone_and_classes_not_on_each_other() -> None:
    assert poisson_arrivals(3, [CHAT], 60) == poisson_arrivals(3, [CHAT], 60)
    assert poisson_arrivals(3, [CHAT], 60) != poisson_arrivals(4, [CHAT], 60)
    both = poisson_arrivals(3, [LONG, CHAT], 60)
    assert [arrival for arrival in both if arrival.label == "chat"] == poisson_arrivals(3, [CHAT], 60)


@pytest.mark.parametrize(("rate_per_s", "duration_s"), [(0.0, 10.0), (-1.0, 10.0), (1.0, 0.0)])
def test_a_run_that_can_have_no_arrivals_is_an_error(rate_per_s: float, duration_s: float) -> None:
    with pytest.raises(ValueError):
        poisson_arrivals(1, [RequestClass("chat", rate_per_s, 1, 1)], duration_s)


async def test_requests_are_sent_when_due_even_while_earlier_ones_run() -> None:
    arrivals = [Arrival(0.05 * index, "chat", 10, 3) for index in range(5)]
    async with FakeOpenAI(first_gap_s=0.4) as server, httpx.AsyncClient(trust_env=False) as client:
        records = await open_loop(client, options(server.url), [(arrival, "a few words") for arrival in arrivals])
    assert server.num_running_max == 5
    assert [record.error for record in records] == [""] * 5
    assert {record.label for record in records} == {"chat"}
    assert all(record.due_s is not None and record.sent_s >= record.due_s for record in records)


async def test_token_ids_travel_as_they_are() -> None:
    async with FakeOpenAI(failures={0: "refuse"}) as server, httpx.AsyncClient(trust_env=False) as client:
        [record] = await open_loop(client, options(server.url), [(Arrival(0.0, "long", 3, 8), [5, 6, 7])])
    assert server.bodies[0]["prompt"] == [5, 6, 7]
    assert server.bodies[0]["max_tokens"] == 8
    assert record.error == "HTTP 429 overloaded_error"


def test_time_in_the_senders_queue_counts_against_the_server() -> None:
    late = RequestRecord(2.0, 4.0, (2.5, 3.0, 3.9), 10, 3, 0, due_s=1.0, label="chat")
    report = summarize([late], wall_s=4.0)
    assert report["ttft_ms"]["p50"] == 1500.0
    assert report["e2e_ms"]["p50"] == 3000.0
    assert report["worst_gap_ms"]["p50"] == 900.0
