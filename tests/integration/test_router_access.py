"""The front door with real HTTP: keys on every route, deadlines of clients, keep-alive and ids of streams, limits before parsing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from common.api_keys import ApiKey, KeyRing, digest_of
from router.access.gate import OPEN_ROUTES
from tests.fakes.router_harness import Harness, running_router
from tests.fakes.worker import SECRET

BODY = {"model": "tiny", "prompt": "a prompt that is long enough for both legs", "seed": 1, "max_tokens": 6}
KEYS = KeyRing([ApiKey("team-a", digest_of("key of a")), ApiKey("team-b", digest_of("key of b"))])
A = {"Authorization": "Bearer key of a"}


async def post(harness: Harness, headers: dict[str, str], **fields: Any) -> httpx.Response:
    return await harness.client.post("/v1/completions", json=BODY | fields, headers=headers)


def all_routes(harness: Harness) -> list[tuple[str, str]]:
    """(method, path) of everything that is registered, and of something that is not."""
    routes = [route for route in harness.router.app._api.routes if isinstance(route, Route)]
    named = [(method, route.path.replace("{name:path}", "tiny")) for route in routes for method in route.methods or ()]
    return [
        *named,
        ("GET", "/nothing-here"),
        ("GET", "/v1/models/"),
        ("GET", "/healthz/x"),
        ("GET", "//healthz"),
        ("OPTIONS", "/v1/models"),
    ]


async def test_every_route_wants_a_key_but_the_named_ones() -> None:
    async with running_router(keys=KEYS, settings={"metrics_open": False}) as harness:
        routes = all_routes(harness)
        assert len(routes) > 15
        for method, path in routes:
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "Basic key of a"},
                {"X-Api-Key": "key of a"},
            ):
                response = await harness.client.request(method, path, headers=headers)
                if path in OPEN_ROUTES:
                    assert response.status_code != 401, (method, path)
                    continue
                assert response.status_code == 401, (method, path, headers)
                assert response.headers["www-authenticate"] == "Bearer" and response.headers["x-request-id"]
                if method != "HEAD":
                    error = response.json()["error"]
                    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                assert "key of a" not in response.text
        assert not any(worker.specs for worker in harness.workers), "a request without a key reached a worker"
        assert harness.metric("baton_requests_refused_total", kind="Unauthenticated") > 0


async def test_known_keys_pass_and_only_their_ids_are_logged() -> None:
    async with running_router(keys=KEYS) as harness:
        assert (await post(harness, A)).status_code == 200
        assert (await harness.client.get("/metrics")).status_code == 200, "open unless the operator closes it"
        await harness.until(lambda: harness.router.orchestrator.num_active == 0)
        assert [line["key"] for line in harness.log_lines("request")] == ["team-a"]
        assert "key of a" not in harness.log_text
        assert "key of a" not in (await harness.client.get("/metrics")).text


async def test_two_authorization_headers_are_no_key() -> None:
    async with running_router(keys=KEYS) as harness:
        headers = [("Authorization", "Bearer key of a"), ("Authorization", "Bearer key of b")]
        assert (await harness.client.get("/v1/models", headers=headers)).status_code == 401


async def test_without_keys_everyone_may_call() -> None:
    async with running_router() as harness:
        assert (await post(harness, {})).status_code == 200
        assert (await post(harness, A)).status_code == 200


@pytest.mark.parametrize("apart", [True, False])
async def test_prefix_caches_of_keys_are_apart_when_the_operator_asks(apart: bool) -> None:
    async with running_router(keys=KEYS, settings={"prefix_cache_per_key": apart}) as harness:
        for headers in (A, {"Authorization": "Bearer key of b"}, A):
            assert (await post(harness, headers, user="x")).status_code == 200
        salts = [spec.cache_salt for spec in harness.decode[0].specs]
        assert salts[0] == salts[2]
        assert (salts[0] != salts[1] and all(len(salt) == 16 for salt in salts)) if apart else set(salts) == {b""}
        assert SECRET not in b"".join(salts)


async def test_a_client_cannot_choose_what_is_internal() -> None:
    async with running_router() as harness:
        for field in ("cache_salt", "prefill_kv_address", "handoff_id", "kv_transfer_params", "epoch"):
            response = await post(harness, {}, **{field: "10.0.0.1:1"})
            assert response.status_code == 400 and response.json()["error"]["param"] == field
        headers = {"X-Prefill-Host-Port": "10.0.0.1:1", "X-Baton-Key-Id": "team-a", "X-Cache-Salt": "x"}
        assert (await post(harness, headers)).status_code == 200
        assert all(spec.cache_salt == b"" for spec in harness.decode[0].specs)


@pytest.mark.parametrize("value", ["0", "-1", "601", "1e3", "nan", "inf", "", "x", "1,5", "9" * 40])
async def test_bad_deadlines_are_refused_by_name(value: str) -> None:
    async with running_router() as harness:
        response = await post(harness, {"X-Request-Timeout": value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "X-Request-Timeout" and "600" in response.json()["error"]["message"]


async def test_the_clients_deadline_ends_the_request_and_reaches_the_workers() -> None:
    async with running_router() as harness:
        harness.decode[0].script.stall_at = 3
        response = await post(harness, {"X-Request-Timeout": "0.4"})
        assert response.status_code == 504 and "0.4 s" in response.json()["error"]["message"]
        assert all(0 < spec.deadline_s <= 0.4 for worker in harness.workers for spec in worker.specs)
        await harness.decode[0].wait_for(lambda: bool(harness.decode[0].aborted))
        harness.decode[0].script.stall_at = None
        assert (await post(harness, {"X-Request-Timeout": "600"})).status_code == 200


async def test_a_body_that_announces_too_much_is_refused_before_it_is_read() -> None:
    async with running_router(settings={"body_bytes_max": 2048}) as harness:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(harness.url.rsplit(":", 1)[1]))
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999999999999\r\n\r\n"
        )
        writer.write(head.encode())
        async with asyncio.timeout(5):
            answer = await reader.readuntil(b"\r\n\r\n")
        assert b" 400 " in answer.split(b"\r\n")[0] + b" "
        writer.close()
        fits = await post(harness, {}, prompt="x" * 400)
        assert fits.status_code == 200


async def test_stream_events_have_ids_in_order_and_silence_is_bridged_by_comments() -> None:
    async with running_router(settings={"sse_keep_alive_s": 0.05}) as harness:
        harness.decode[0].script.stall_at = 3
        lines: list[str] = []
        async with harness.client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(": keep-alive") == 2:
                    harness.decode[0].script.release.set()
        events = [line for line in lines if line.startswith("data: ")]
        ids = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]
        request_id = json.loads(events[0].removeprefix("data: "))["id"]
        assert ids == [f"{request_id}/{number}" for number in range(len(events))] and events[-1] == "data: [DONE]"
        assert lines.count(": keep-alive") >= 2


async def test_a_first_token_that_is_late_begins_the_stream_and_a_failure_then_is_an_event() -> None:
    async with running_router(settings={"sse_keep_alive_s": 0.05}) as harness:
        harness.prefill[0].script.stall_at = 0
        lines: list[str] = []
        headers = {"X-Request-Timeout": "0.5"}
        async with harness.client.stream("POST", "/v1/completions", json=BODY | {"stream": True}, headers=headers) as response:
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines()]
        assert lines[0] == ": keep-alive"
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert data[-1] == "[DONE]" and json.loads(data[-2])["error"]["kind"] == "DeadlineExceeded"
