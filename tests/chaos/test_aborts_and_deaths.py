"""Clients that leave and workers that die: no leaked block, no wrong token, everybody else undisturbed."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.harness import Fleet

NUM_ABORTS = 200
CONCURRENCY = 12


def body(prompt: list[int], **options: object) -> dict[str, object]:
    return {
        "model": "smollm2-135m", "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True, "stream": True, "timeline": True,
    } | options  # fmt: skip


async def stream(client: httpx.AsyncClient, fleet: Fleet, request: dict[str, object]) -> dict[str, object]:
    """Reads one stream to its end; returns the last chunk's `baton` object. Fails on an error event."""
    last: dict[str, object] = {}
    async with client.stream("POST", f"{fleet.url}/v1/completions", json=request) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                last = chunk.get("baton") or last
    return last


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_block_leaks_after_200_randomly_aborted_requests(pairs: Fleet) -> None:
    rng = random.Random(3)
    probe = [rng.randrange(1000, 40000) for _ in range(70)]

    async def run() -> int:
        limit = asyncio.Semaphore(CONCURRENCY)
        cut = 0

        async def one(index: int, client: httpx.AsyncClient) -> None:
            nonlocal cut
            prompt = [rng.randrange(1000, 40000) for _ in range(rng.choice([3, 15, 16, 17, 90, 200]))]
            patience_s = rng.choice([0.0, 0.005, 0.02, 0.05, 0.1, 0.3, 0.8])
            async with limit:
                try:
                    async with asyncio.timeout(patience_s):
                        await stream(client, pairs, body(prompt))
                except TimeoutError:
                    cut += 1

        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=CONCURRENCY)) as client:
            before = (await stream(client, pairs, body(probe)))["token_ids"]
            await asyncio.gather(*[one(index, client) for index in range(NUM_ABORTS)])
            after = (await stream(client, pairs, body(probe)))["token_ids"]
        assert before == after
        return cut

    cut = asyncio.run(run())
    assert cut >= NUM_ABORTS // 2, f"only {cut} requests were really cut off"
    pairs.wait_idle(timeout_s=15)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["decode", "prefill"])
def test_killed_worker_costs_no_token_of_any_stream(pairs: Fleet, victim: str) -> None:
    rng = random.Random(11)
    prompts = [[rng.randrange(1000, 40000) for _ in range(rng.choice([20, 64, 150]))] for _ in range(6)]

    async def run() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            calm = [(await stream(client, pairs, body(prompt)))["token_ids"] for prompt in prompts]
            streams = [asyncio.create_task(stream(client, pairs, body(prompt))) for prompt in prompts]
            await asyncio.sleep(0.4)
            await asyncio.to_thread(pairs.kill, f"{victim}-0", signal.SIGKILL)
            stormy = [(await task)["token_ids"] for task in streams]
        assert stormy == calm

    asyncio.run(run())
    pairs.start_worker(victim, f"{victim}-0")
    pairs.wait_ready(2, 2)
    pairs.wait_idle()


@pytest.mark.timeout(120)
def test_worker_of_another_block_size_is_refused_and_never_used(pairs: Fleet) -> None:
    stranger = pairs.start_worker("decode", "decode-odd", "--block-size", "32", "--num-blocks", "64")
    try:
        reason = wait_for_refusal(pairs, "decode-odd")
        assert "block" in reason, reason
        asyncio.run(_one(pairs))
    finally:
        stranger.process.terminate()
        stranger.process.wait(timeout=30)
        del pairs.children["decode-odd"]


async def _one(fleet: Fleet) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        timeline = await stream(client, fleet, body(list(range(2000, 2040))))
    assert timeline["decode_worker"] != "decode-odd"


def wait_for_refusal(fleet: Fleet, worker_id: str, timeout_s: float = 60.0) -> str:
    """Until the router says that it will not use this worker; returns its reason."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for worker, reason in httpx.get(f"{fleet.url}/readyz", timeout=5).json()["refused"].items():
            if worker.startswith(worker_id + "/"):
                return str(reason)
        time.sleep(0.2)
    raise AssertionError(f"{worker_id} was not refused within {timeout_s} s")


@pytest.mark.timeout(180)
def test_drained_decode_worker_finishes_its_streams_and_exits_zero(model: Path, pairs: Fleet) -> None:
    async def run() -> int:
        async with httpx.AsyncClient(timeout=60) as client:
            prompts = [[3000 + i * 50 + j for j in range(40)] for i in range(4)]
            calm = [(await stream(client, pairs, body(prompt)))["token_ids"] for prompt in prompts]
            streams = [asyncio.create_task(stream(client, pairs, body(prompt))) for prompt in prompts]
            await asyncio.sleep(0.3)
            child = pairs.children["decode-1"]
            child.process.terminate()
            assert [(await task)["token_ids"] for task in streams] == calm
            code = await asyncio.to_thread(child.process.wait, 40)
        del pairs.children["decode-1"]
        return int(code)

    assert asyncio.run(run()) == 0
    pairs.start_worker("decode", "decode-1")
    pairs.wait_ready(2, 2)
