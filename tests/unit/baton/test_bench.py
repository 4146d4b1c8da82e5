"""`baton bench` against a scripted server: what is sent, how many at once, and how every kind of failure is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton import bench
from baton.bench import BenchOptions, run_bench
from baton.main import build_parser
from baton.openai_stream import StreamFailed
from tests.unit.baton.fake_openai import FakeOpenAI

CALIBRATION = len(bench.PROBE_WORDS)


def options(url: str, **changes: object) -> BenchOptions:
    values: dict[str, object] = {
        "url": url, "model": "fake", "endpoint": "completions", "concurrency": 3, "requests": 9, "prompt_tokens": 101,
        "output_tokens": 5, "seed": 4, "timeout_s": 10.0,
    }  # fmt: skip
    return BenchOptions(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_every_request_is_answered_and_counted_by_the_servers_usage(endpoint: str) -> None:
    async with FakeOpenAI() as server:
        report = await run_bench(options(server.url, endpoint=endpoint))
    assert report["requests"] == report["answered"] == 9
    assert report["errors"] == {}
    assert report["completion_tokens"] == 45
    assert report["pieces"] == 45
    measured = server.bodies[CALIBRATION:]
    assert all(body["max_tokens"] == 5 and body["stream"] and body["ignore_eos"] for body in measured)
    assert all(body["stream_options"] == {"include_usage": True} for body in measured)


async def test_prompts_have_about_the_wanted_tokens_although_a_template_adds_some() -> None:
    async with FakeOpenAI() as server:
        report = await run_bench(options(server.url, prompt_tokens=211))
    assert report["prompt_tokens"] / 9 == pytest.approx(211, abs=2)


async def test_prompts_differ_within_a_run_and_between_seeds_but_not_between_runs_of_one_seed() -> None:
    async with FakeOpenAI() as server:
        for seed in (1, 1, 2):
            await run_bench(options(server.url, seed=seed))
    runs = [server.bodies[start : start + CALIBRATION + 9] for start in range(0, len(server.bodies), CALIBRATION + 9)]
    first, again, other = ([body["prompt"] for body in run[CALIBRATION:]] for run in runs)
    assert len(set(first)) == 9
    assert sorted(first) == sorted(again)
    assert not set(first) & set(other)


async def test_the_loop_is_closed_at_the_wanted_concurrency() -> None:
    async with FakeOpenAI(gap_s=0.005) as server:
        await run_bench(options(server.url, concurrency=4, requests=16))
    assert server.num_running_max == 4


async def test_times_come_from_the_pieces() -> None:
    async with FakeOpenAI(first_gap_s=0.05, gap_s=0.02) as server:
        report = await run_bench(options(server.url, concurrency=1, requests=3))
    assert report["ttft_ms"]["p50"] >= 50
    assert report["itl_ms"]["p50"] >= 20
    assert report["tpot_ms"]["p50"] >= 20
    assert report["e2e_ms"]["p50"] >= 50 + 4 * 20
    assert report["ttft_ms"]["p50"] < report["e2e_ms"]["p50"]


async def test_failures_are_counted_by_kind_and_in_no_latency() -> None:
    failures = {CALIBRATION + 1: "refuse", CALIBRATION + 3: "cut", CALIBRATION + 5: "error event", CALIBRATION + 7: "refuse"}
    async with FakeOpenAI(failures=failures) as server:
        report = await run_bench(options(server.url, concurrency=1))
    assert report["answered"] == 5
    assert report["errors"]["HTTP 429 overloaded_error"] == 2
    assert report["errors"]["service_unavailable_error"] == 1
    assert sum(report["errors"].values()) == 4
    assert report["completion_tokens"] == 25


async def test_a_request_that_never_ends_is_bounded() -> None:
    async with FakeOpenAI(gap_s=0.0, first_gap_s=0.0) as server:
        server.gap_s = 0.0
        record_options = options(server.url, requests=1, concurrency=1, timeout_s=0.2)
        server.failures = {}
        import httpx

        async with httpx.AsyncClient(trust_env=False) as client:
            server.first_gap_s = 30.0
            record = await bench.send(client, record_options, "hello", 3)
    assert record.error == "no end within 0.2 s"


async def test_warm_up_requests_are_not_measured() -> None:
    async with FakeOpenAI() as server:
        report = await run_bench(options(server.url, warmup=2))
    assert report["requests"] == 9
    assert len(server.bodies) == CALIBRATION + 2 + 9


async def test_a_server_that_refuses_everything_is_an_error_not_a_report() -> None:
    async with FakeOpenAI(failures={0: "refuse"}) as server:
        with pytest.raises(StreamFailed, match="overloaded_error"):
            await run_bench(options(server.url))


def test_the_api_key_is_neither_printed_nor_reported() -> None:
    assert "sk-secret" not in repr(options("http://x", api_key="sk-secret"))


def test_the_command_writes_json_and_exits_2_when_nobody_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_path = tmp_path / "report.json"
    arguments = build_parser().parse_args(
        ["bench", "--url", "http://127.0.0.1:9/v1", "--json", str(report_path), "--requests", "1"]
    )
    assert bench.run(arguments) == 2
    assert not report_path.exists()
    assert "ConnectError" in capsys.readouterr().err


async def test_the_report_is_plain_json() -> None:
    async with FakeOpenAI() as server:
        report = await run_bench(options(server.url, api_key="sk-secret"))
    text = json.dumps(report)
    assert json.loads(text) == report
    assert "sk-secret" not in text
