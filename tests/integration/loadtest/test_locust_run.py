"""Locust headless, as a process, against a scripted server and against a real router with fake workers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.router_harness import running_router
from tests.unit.baton.fake_openai import FakeOpenAI

ROOT = Path(__file__).resolve().parents[3]
# Not importorskip: importing locust patches the sockets of the whole test process.
pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("locust") and importlib.util.find_spec("gevent")),
    reason="locust is not installed (extra `loadtest`)",
)


async def locust(url: str, folder: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    report = folder / "report.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--only-summary"),
        *("--users", "2", "--spawn-rate", "2", "--run-time", "5s", "--stop-timeout", "20", "--host", url, "--report-json", str(report)),
        *("--chat-output-tokens", "6", "--chat-prompt-tokens", "60", *flags),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    text = output.decode()
    assert report.exists(), text
    return process.returncode, json.loads(report.read_text()), text


def entries(output: str) -> dict[tuple[str, str], int]:
    """Locust's own final counts, from the summary that it prints (its CSV files end a second before the run does)."""
    summary = output.split("Response time percentiles")[0]
    found = re.findall(r"^(TTFT|ITL|TPOT|SSE) +(\w+) +(\d+) ", summary, re.MULTILINE)
    return {(kind, name): int(count) for kind, name, count in found}


async def test_every_token_is_an_entry_and_the_exit_code_is_0(tmp_path: Path) -> None:
    async with FakeOpenAI(gap_s=0.01) as server:
        code, report, output = await locust(server.url + "/v1", tmp_path, "--model", "fake")
    assert code == 0, output
    num = report["all"]["answered"]
    assert num > 2 and report["all"]["tokens_lost"] == 0 and report["abandoned"] == 0
    assert entries(output) == {("SSE", "chat"): num, ("TTFT", "chat"): num, ("TPOT", "chat"): num, ("ITL", "chat"): 5 * num}
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(prompts)) == len(prompts)
    assert all(body["ignore_eos"] and body["max_tokens"] == 6 for body in server.bodies[2:])


@pytest.mark.parametrize(
    ("failure", "error"),
    [("cut", "stream cut"), ("error event", "service_unavailable_error"), ("refuse", "HTTP 429 overloaded_error")],
)
async def test_each_failure_is_counted_and_its_bound_decides(tmp_path: Path, failure: str, error: str) -> None:
    async with FakeOpenAI(gap_s=0.01, failures={4: failure}) as server:
        code, report, output = await locust(server.url, tmp_path)
    assert code == 1, output
    assert report["all"]["errors"] == {error: 1}
    assert error in report["verdict"][0]


async def test_a_lost_token_fails_the_run_whatever_ratio_is_allowed(tmp_path: Path) -> None:
    async with FakeOpenAI(gap_s=0.01, pieces=["a", "b"]) as server:
        code, report, output = await locust(server.url, tmp_path, "--failure-ratio-max", "1")
    assert code == 1, output
    assert report["all"]["tokens_lost"] == 4 * report["all"]["requests"] > 0


async def test_a_server_that_is_not_there_ends_the_run_at_once(tmp_path: Path) -> None:
    code, report, output = await locust("http://127.0.0.1:1", tmp_path, "--run-time", "60s")
    assert code == 1, output
    assert "did not answer" in report["verdict"][0]


async def test_a_real_router_loses_nothing_under_mixed_load(tmp_path: Path) -> None:
    async with running_router() as harness:
        models = (await harness.client.get("/v1/models")).json()
        name = models["data"][0]["id"]
        code, report, output = await locust(
            harness.url, tmp_path, "--model", name, "--workload", "mixed", "--chat-weight", "1", "--timeline", "yes",
            "--long-prompt-tokens", "400", "--chat-prompt-tokens", "200", "--long-output-tokens", "3",
        )  # fmt: skip
    assert code == 0, output
    assert report["all"]["tokens_lost"] == 0
    assert set(report["classes"]) == {"chat", "long"}
    assert sum(report["all"]["modes"].values()) == report["all"]["answered"]
