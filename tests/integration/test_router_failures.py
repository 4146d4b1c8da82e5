"""What goes wrong between router and workers, and what the client sees: exact resumption, clean errors, prompt aborts, no leak."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest

from common.errors import Draining, StoreUnavailable
from common.types import Role, WorkerState
from router.streaming import OVERFLOW_GRACE_S
from tests.fakes.router_harness import Harness, running_router, sse_events
from tests.fakes.worker import FakeWorker, completion_tokens
from tests.unit.router.tiny_tokenizer import ids_of, make_tokenizer

PROMPT = "a prompt that is long enough for both legs"
BODY = {"model": "tiny", "prompt": PROMPT, "seed": 1, "timeline": True}


def expected_text(num_tokens: int) -> str:
    return make_tokenizer().decode(completion_tokens(ids_of(PROMPT), num_tokens, 1))


async def complete(harness: Harness, **fields: Any) -> httpx.Response:
    return await harness.client.post("/v1/completions", json={**BODY, **fields})


async def assert_exact(harness: Harness, num_tokens: int = 30, attempts: int | None = None) -> dict[str, Any]:
    """One streamed completion; whatever went wrong, text and count are those of an undisturbed run."""
    body = {**BODY, "max_tokens": num_tokens, "stream": True, "stream_options": {"include_usage": True}}
    async with harness.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        events = [event async for event in sse_events(response)]
    assert events[-1] == "[DONE]" and "error" not in events[-2], events[-2]
    assert "".join(event["choices"][0]["text"] for event in events[:-2]) == expected_text(num_tokens)
    assert events[-2]["usage"]["completion_tokens"] == num_tokens
    baton: dict[str, Any] = events[-3]["baton"]
    assert attempts is None or baton["attempts"] == attempts, baton["retries"]
    return baton


# ---- retries and resumption ------------------------------------------------------------------------------------------


async def test_refusing_decode_worker_is_passed_over_and_prefill_is_released() -> None:
    async with running_router(num_decode=2) as harness:
        harness.decode[0].script.refuse_kind = "Overloaded"
        for _ in range(3):
            baton = await assert_exact(harness)
            assert baton["decode_worker"] == "d1"
        assert harness.metric("baton_request_retries_total", kind="Overloaded") >= 1
        assert harness.prefill[0].num_running == 0


async def test_refusal_by_all_decode_workers_is_429_with_retry_after() -> None:
    async with running_router(num_decode=4) as harness:
        for worker in harness.decode:
            worker.script.refuse_kind, worker.script.refuse_retry_after_s = "Overloaded", 3.0
        harness.prefill[0].script.stall_at = 0  # nothing was emitted yet
        response = await complete(harness, max_tokens=5)
        assert response.status_code == 429 and response.headers["retry-after"] == "3"
        assert response.json()["error"]["kind"] == "Overloaded"
        assert sum(worker.count("reserve") for worker in harness.decode) == 3, "the first try and two retries"
        await harness.prefill[0].wait_for(lambda: harness.prefill[0].num_running == 0 and harness.prefill[0].count("abort") == 3)


@pytest.mark.parametrize("die_at", [1, 2, 7, 29])
async def test_decode_worker_dying_mid_stream_resumes_exactly_at_the_next_index(die_at: int) -> None:
    async with running_router(num_decode=2) as harness:
        victim = harness.decode[0]
        victim.script.die_at = die_at
        baton = await assert_exact(harness)
        assert victim.count("reserve") == 1, "equal workers take turns, the first request goes to d0"
        assert baton["attempts"] == 2 and baton["retries"] == ["decode d0: WorkerUnavailable"]
        resumed = harness.prefill[0].specs[-1]
        num_emitted = len(resumed.token_ids) - len(PROMPT)
        assert resumed.num_prompt_tokens == len(PROMPT) and 1 <= num_emitted <= die_at, "what died unsent is generated again"
        assert list(resumed.token_ids) == [*ids_of(PROMPT), *completion_tokens(ids_of(PROMPT), num_emitted, 1)]
        assert [attempt.epoch for _, attempt in harness.prefill[0].commands] == [1, 2]
        assert harness.decode[1].count("reserve") == (0 if num_emitted == 29 else 1), "one token left needs no decode worker"


async def test_the_only_decode_worker_restarting_mid_stream_continues_on_its_new_life() -> None:
    async with running_router() as harness:
        old = harness.decode[0]
        old.script.die_at = 5
        old.script.token_delay_s = 0.002
        streaming = asyncio.create_task(assert_exact(harness))
        await harness.until(lambda: old.count("reserve") == 1 and harness.num_usable(Role.DECODE) == 0)
        new = FakeWorker("d0", Role.DECODE, handoffs=old.handoffs)
        await new.start()
        harness.workers.append(new)
        await harness.publish(new)
        baton = await streaming
        assert baton["attempts"] == 2 and new.count("reserve") == 1


async def test_prefill_worker_dying_before_token_zero_is_replaced() -> None:
    async with running_router(num_prefill=2) as harness:
        victim = harness.prefill[0]
        victim.script.die_at = 0
        baton = await assert_exact(harness)
        assert victim.count("prefill") == 1 and baton["attempts"] == 2 and baton["prefill_worker"] == "p1"
        await harness.decode[0].wait_for(lambda: harness.decode[0].count("abort") == 1)


async def test_the_only_prefill_worker_dying_leaves_decode_alone() -> None:
    async with running_router() as harness:
        harness.prefill[0].script.die_at = 0
        baton = await assert_exact(harness)
        assert (
            baton["mode"] == "local" and harness.metric("baton_placements_total", mode="local", because="no_prefill_worker") == 1
        )


async def test_prefill_failing_after_token_zero_does_not_disturb_decode() -> None:
    async with running_router() as harness:
        harness.decode[0].script.stall_at = 3
        streaming = asyncio.create_task(assert_exact(harness, attempts=1))
        await harness.decode[0].wait_for(lambda: harness.decode[0].num_tokens_sent >= 2)
        await harness.prefill[0].stop()
        harness.decode[0].script.release.set()
        await streaming


async def test_failed_handoffs_end_in_local_decode() -> None:
    async with running_router() as harness:
        harness.decode[0].script.fail_kind_at = ("HandoffFailed", 1)
        worker = harness.decode[0]
        streaming = asyncio.create_task(assert_exact(harness, attempts=3))
        await worker.wait_for(lambda: worker.count("generate") == 1)  # the third attempt is the local one
        worker.script.fail_kind_at = None
        baton = await streaming
        assert baton["mode"] == "local" and worker.count("reserve") == 2


async def test_corrupt_kv_is_recomputed_once_then_reported() -> None:
    async with running_router() as harness:
        harness.decode[0].script.refuse_kind = "KVCorrupt"
        harness.prefill[0].script.stall_at = 0
        response = await complete(harness, max_tokens=8)
        assert response.status_code == 503 and response.json()["error"]["kind"] == "KVCorrupt"
        assert [kind for kind, _ in harness.decode[0].commands if kind != "abort"] == ["reserve", "generate"]


async def test_a_cut_stream_is_reconnected_and_used_again() -> None:
    async with running_router(num_decode=1) as harness:
        await harness.decode[0].drop_sessions()
        await harness.until(lambda: harness.num_usable(Role.DECODE) == 0)
        await harness.until(lambda: harness.num_usable(Role.DECODE) == 1)
        await assert_exact(harness, attempts=1)


async def test_errors_that_are_nobodys_fault_but_the_requests_are_not_retried() -> None:
    async with running_router(num_prefill=2, num_decode=2) as harness:
        for worker in harness.workers:
            worker.script.refuse_kind = "InvalidRequest"
        response = await complete(harness)
        assert response.status_code == 400 and response.json()["error"]["message"] == "refused by script"
        assert sum(worker.count("reserve") for worker in harness.decode) == 1


async def test_everybody_dead_is_503_before_the_first_token() -> None:
    async with running_router() as harness:
        harness.prefill[0].script.die_at = harness.decode[0].script.die_at = 0
        response = await complete(harness, max_tokens=5)
        assert response.status_code == 503 and response.json()["error"]["kind"] == "NoWorker"
        assert response.headers["retry-after"] == "1"
        assert (await harness.client.get("/readyz")).status_code == 503


async def test_failure_after_the_first_byte_is_one_error_event_and_the_end() -> None:
    async with running_router(settings={"resume_wait_s": 0.3}) as harness:
        harness.decode[0].script.die_at = 4
        async with harness.client.stream("POST", "/v1/completions", json={**BODY, "stream": True, "max_tokens": 20}) as response:
            assert response.status_code == 200
            events = [event async for event in sse_events(response)]
        assert events[-1] == "[DONE]" and events[-2]["error"]["kind"] == "NoWorker"
        assert events[-2]["error"]["request_id"] == events[0]["id"]
        assert sum("error" in event for event in events) == 1
        shown = "".join(event["choices"][0]["text"] for event in events[:-2])
        assert shown and expected_text(4).startswith(shown)


async def test_deadline_is_504_and_reaches_both_workers() -> None:
    async with running_router(settings={"request_timeout_s": 0.3}) as harness:
        harness.prefill[0].script.stall_at = 0
        response = await complete(harness)
        assert response.status_code == 504
        for worker in harness.workers:
            await worker.wait_for(lambda worker=worker: worker.count("abort") == 1 and worker.num_running == 0)


# ---- cancellation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("moment", ["prefilling", "decoding"])
async def test_disconnect_reaches_both_workers_within_a_second(stream: bool, moment: str) -> None:
    async with running_router() as harness:
        prefill, decode = harness.prefill[0], harness.decode[0]
        (prefill if moment == "prefilling" else decode).script.stall_at = 0 if moment == "prefilling" else 5
        request = asyncio.create_task(complete(harness, stream=stream, max_tokens=50))
        await decode.wait_for(lambda: decode.count("reserve") == 1)
        if moment == "decoding":
            await decode.wait_for(lambda: decode.num_tokens_sent >= 4)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await decode.wait_for(lambda: decode.count("abort") == 1 and decode.num_running == 0, timeout_s=1.0)
        if moment == "prefilling":
            await prefill.wait_for(lambda: prefill.count("abort") == 1 and prefill.num_running == 0, timeout_s=1.0)
        async with asyncio.timeout(1.0):
            await harness.router.orchestrator.idle.wait()
        (line,) = harness.log_lines("request")
        assert line["outcome"] == "cancelled"
        assert harness.metric("baton_requests_ended_total", outcome="cancelled", kind="ClientCancelled") == 1


async def test_disconnect_after_the_first_chunk_stops_decode() -> None:
    async with running_router() as harness:
        harness.decode[0].script.stall_at = 3
        async with harness.client.stream("POST", "/v1/completions", json={**BODY, "stream": True, "max_tokens": 50}) as response:
            await anext(aiter(sse_events(response)))
        await harness.decode[0].wait_for(
            lambda: harness.decode[0].num_running == 0 and harness.decode[0].count("abort") == 1, timeout_s=1.0
        )


async def test_many_random_disconnects_leave_nothing_behind() -> None:
    async with running_router(num_prefill=2, num_decode=2) as harness:
        for worker in harness.workers:
            worker.script.token_delay_s = 0.001

        async def one(index: int) -> None:
            try:
                async with asyncio.timeout(0.01 * index if index else None):  # one stays to the end, however slow the machine is
                    response = await complete(harness, max_tokens=40, stream=bool(index % 2))
                    assert response.status_code == 200
            except TimeoutError:
                pass

        await asyncio.gather(*(one(index) for index in range(60)))
        async with asyncio.timeout(5):
            await harness.router.orchestrator.idle.wait()
        for worker in harness.workers:
            await worker.wait_for(lambda worker=worker: worker.num_running == 0)
        started = harness.metric("baton_requests_started_total", endpoint="text_completion")
        ended = sum(
            harness.metric("baton_requests_ended_total", outcome=o, kind=k)
            for o, k in [("length", ""), ("cancelled", "ClientCancelled")]
        )
        assert started == ended > 0 and harness.metric("baton_num_requests_running") == 0


async def test_a_client_that_does_not_read_is_cut_off_alone() -> None:
    async with running_router(next_token=lambda known, seed: 65, settings={"output_chars_max": 2000}) as harness:
        for worker in harness.workers:
            worker.max_sequence_tokens = 10**6
            await harness.publish(worker)
        harness.router.app._tokenizer.max_positions = 10**6
        await harness.router.fleet.refresh()
        decode = harness.decode[0]
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that little text fits between the two ends
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", int(harness.url.rsplit(":", 1)[1])))
        body = json.dumps({"model": "tiny", "prompt": PROMPT, "stream": True, "max_tokens": 500_000}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        await asyncio.get_running_loop().sock_sendall(client, head + body)
        await decode.wait_for(lambda: decode.num_tokens_sent > 100)
        assert (await complete(harness, max_tokens=30)).json()["choices"][0]["text"] == make_tokenizer().decode([65] * 30)
        await decode.wait_for(lambda: decode.count("abort") == 1 and decode.num_running == 0, timeout_s=60.0)
        async with asyncio.timeout(OVERFLOW_GRACE_S + 5):
            await harness.router.orchestrator.idle.wait()
        assert harness.metric("baton_slow_clients_total") == 1
        client.close()


# ---- bounds, drain, fleet, store -------------------------------------------------------------------------------------


async def test_surplus_requests_get_429_at_once_and_others_finish() -> None:
    async with running_router(settings={"requests_max": 2}) as harness:
        decode = harness.decode[0]
        decode.script.stall_at = 3
        running = [asyncio.create_task(complete(harness, max_tokens=10)) for _ in range(2)]
        await decode.wait_for(lambda: decode.count("reserve") == 2)
        refused = await complete(harness)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        decode.script.release.set()
        assert [(await task).json()["choices"][0]["text"] for task in running] == [expected_text(10)] * 2
        assert (await complete(harness, max_tokens=10)).status_code == 200
        assert harness.metric("baton_requests_refused_total", kind="Overloaded") == 1


async def test_draining_refuses_new_requests_and_finishes_running_ones() -> None:
    async with running_router() as harness:
        decode = harness.decode[0]
        decode.script.stall_at = 3
        running = asyncio.create_task(complete(harness, max_tokens=10))
        await decode.wait_for(lambda: decode.count("reserve") == 1)
        harness.router.admission.is_draining = True
        assert (await complete(harness)).status_code == 503
        assert (await harness.client.get("/readyz")).json()["reasons"] == ["draining"]
        decode.script.release.set()
        assert (await running).json()["choices"][0]["text"] == expected_text(10)


async def test_shutdown_ends_a_stream_with_an_error_event_and_aborts_the_legs() -> None:
    async with running_router() as harness:
        decode = harness.decode[0]
        decode.script.stall_at = 3
        running = asyncio.create_task(complete(harness, max_tokens=10, stream=True))
        await decode.wait_for(lambda: decode.num_tokens_sent >= 2)
        harness.router.orchestrator.cancel_all(Draining("the router is shutting down"))
        assert '"kind":"Draining"' in (await running).text
        await decode.wait_for(lambda: decode.count("abort") == 1 and decode.num_running == 0)


async def test_worker_of_another_layout_or_model_is_refused_and_never_used() -> None:
    async with running_router(num_prefill=1, num_decode=1) as harness:
        strangers = [
            FakeWorker("d-blocks", Role.DECODE, fingerprint="other layout", block_size=32),
            FakeWorker("d-model", Role.DECODE, model="another"),
        ]
        for stranger in strangers:
            await stranger.start()
            await harness.publish(stranger)
        harness.workers.extend(strangers)
        async with asyncio.timeout(5):
            while len(harness.router.fleet.refused) < 2:
                await harness.router.fleet.refresh()
        for _ in range(6):
            await assert_exact(harness)
        assert all(stranger.commands == [] for stranger in strangers)
        assert harness.metric("baton_workers_refused_total", reason="kv_layout") == 1
        assert harness.metric("baton_workers_refused_total", reason="model") == 1
        details = {line["worker"]: line["detail"] for line in harness.log_lines("worker_refused")}
        assert "block size 32" in details["d-blocks"] and "'another'" in details["d-model"]


async def test_draining_worker_gets_no_new_request_but_finishes_its_streams() -> None:
    async with running_router(num_decode=2) as harness:
        for worker in harness.decode:
            worker.script.stall_at = 3
        running = asyncio.create_task(assert_exact(harness, attempts=1))
        first, second = harness.decode
        await first.wait_for(lambda: first.count("reserve") == 1)  # equal workers take turns, the first request goes to d0
        busy, other = first, second
        busy.state = WorkerState.DRAINING
        await harness.publish(busy)
        await harness.until(lambda: harness.num_usable(Role.DECODE) == 1)
        busy.script.release.set()
        other.script.release.set()
        await running
        await assert_exact(harness)
        assert busy.count("reserve") == 1 and other.count("reserve") == 1


async def test_address_reused_by_another_life_is_not_used() -> None:
    async with running_router(num_prefill=0) as harness:
        worker = harness.decode[0]
        stale = FakeWorker("d9", Role.DECODE)
        stale.address = worker.address
        await harness.store.publish_worker(stale.info(), stale.census, 60.0)
        await harness.until(
            lambda: any("the registry says d9" in line["error"] for line in harness.log_lines("worker_stream_down"))
        )
        assert harness.num_usable(Role.DECODE) == 1


class AwayStore:
    """Wraps a store; while `is_away` every operation fails as a hung or dead Redis does."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.is_away = False

    def __getattr__(self, name: str) -> Any:
        if self.is_away:

            async def fail(*args: Any, **kwargs: Any) -> Any:
                raise StoreUnavailable("away by script")

            return fail
        return getattr(self._inner, name)


async def test_store_away_changes_nothing_for_streams_and_new_requests() -> None:
    async with running_router(num_decode=2) as harness:  # one decode worker will die
        fleet, orchestrator, journal = harness.router.fleet, harness.router.orchestrator, harness.router.journal
        away = AwayStore(harness.store)
        fleet._store = orchestrator._store = journal._store = away  # type: ignore[assignment]
        away.is_away = True
        await fleet.refresh()
        await assert_exact(harness, attempts=1)
        ready = (await harness.client.get("/readyz")).json()
        assert ready["ready"] and ready["degraded"] == ["the state store is away"]
        harness.decode[0].script.die_at = 4
        harness.decode[1].script.token_delay_s = 0.001
        for _ in range(2):
            await assert_exact(harness)  # epochs go on without the store
        assert harness.metric("baton_journal_entries_dropped_total") > 0
        away.is_away = False
        await fleet.refresh()
        assert (await harness.client.get("/readyz")).json()["degraded"] == []


async def test_store_that_comes_back_empty_does_not_drop_connected_workers() -> None:
    async with running_router() as harness:
        for worker in harness.workers:
            await harness.withdraw(worker)
        for _ in range(3):
            await harness.router.fleet.refresh()
        assert harness.num_usable(Role.DECODE) == 1 and harness.log_lines("store_emptied")
        await assert_exact(harness)
