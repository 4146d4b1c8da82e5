"""The gate in front of a real gRPC server, for all four kinds of method: who gets in, and what a stranger can cause.

Uses a service of its own with one method of each kind, so that a kind that serving.proto does not have today is covered too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from common.rpc.channels import PROOF_KEY, SERVER_OPTIONS, cluster_proof, open_channel, secret_metadata
from common.rpc.interceptors import ClusterGate

SECRET = b"the secret of this cluster"
SERVICE = "test.Kinds"
DEADLINE_S = 10.0

Metadata = tuple[tuple[str, str | bytes], ...]
NO_PROOF: Metadata = (("authorization", "Bearer x"),)
WRONG_PROOF: Metadata = secret_metadata(b"the secret of another cluster")


class Kinds:
    """Echoes numbers. Records what was parsed and served."""

    def __init__(self) -> None:
        self.parsed: list[bytes] = []
        self.served: list[str] = []

    def parse(self, data: bytes) -> int:
        self.parsed.append(data)
        return int(data)

    async def unary_unary(self, request: int, context: object) -> int:
        self.served.append("unary_unary")
        return request

    async def unary_stream(self, request: int, context: object) -> AsyncIterator[int]:
        self.served.append("unary_stream")
        for number in range(request):
            yield number

    async def stream_unary(self, requests: AsyncIterator[int], context: object) -> int:
        self.served.append("stream_unary")
        return sum([number async for number in requests])

    async def stream_stream(self, requests: AsyncIterator[int], context: object) -> AsyncIterator[int]:
        self.served.append("stream_stream")
        async for number in requests:
            yield number

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        ends = {"request_deserializer": self.parse, "response_serializer": lambda number: str(number).encode()}
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "unary_unary": grpc.unary_unary_rpc_method_handler(self.unary_unary, **ends),
                "unary_stream": grpc.unary_stream_rpc_method_handler(self.unary_stream, **ends),
                "stream_unary": grpc.stream_unary_rpc_method_handler(self.stream_unary, **ends),
                "stream_stream": grpc.stream_stream_rpc_method_handler(self.stream_stream, **ends),
            },
        )


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, Kinds, list[None]]]:
    refused: list[None] = []
    server = grpc.aio.server(interceptors=[ClusterGate(SECRET, lambda: refused.append(None))], options=SERVER_OPTIONS)
    kinds = Kinds()
    server.add_generic_rpc_handlers((kinds.handlers(),))
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", kinds, refused
    finally:
        await server.stop(None)


async def _numbers(*numbers: bytes) -> AsyncIterator[bytes]:
    for number in numbers:
        yield number


async def call_unary_unary(channel: grpc.aio.Channel, metadata: Metadata, data: bytes) -> list[bytes]:
    return [await channel.unary_unary(f"/{SERVICE}/unary_unary")(data, metadata=metadata, timeout=DEADLINE_S)]


async def call_unary_stream(channel: grpc.aio.Channel, metadata: Metadata, data: bytes) -> list[bytes]:
    return [
        reply async for reply in channel.unary_stream(f"/{SERVICE}/unary_stream")(data, metadata=metadata, timeout=DEADLINE_S)
    ]


async def call_stream_unary(channel: grpc.aio.Channel, metadata: Metadata, data: bytes) -> list[bytes]:
    method = channel.stream_unary(f"/{SERVICE}/stream_unary")
    return [await method(_numbers(data, data), metadata=metadata, timeout=DEADLINE_S)]


async def call_stream_stream(channel: grpc.aio.Channel, metadata: Metadata, data: bytes) -> list[bytes]:
    method = channel.stream_stream(f"/{SERVICE}/stream_stream")
    return [reply async for reply in method(_numbers(data, data), metadata=metadata, timeout=DEADLINE_S)]


async def stranger_code(channel: grpc.aio.Channel, kind: str, metadata: Metadata, data: bytes) -> grpc.StatusCode:
    """How a call without the right proof ends. Streams of requests stay silent: gRPC's client turns a write that meets the refusal
    into an error of its own.
    """
    if kind.startswith("stream"):
        call = getattr(channel, kind)(f"/{SERVICE}/{kind}")(metadata=metadata, timeout=DEADLINE_S)
        return await call.code()  # type: ignore[no-any-return]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await CALLS[kind][0](channel, metadata, data)
    assert cluster_proof(SECRET) not in str(caught.value)
    return caught.value.code()


CALLS: dict[str, tuple[Callable[[grpc.aio.Channel, Metadata, bytes], Awaitable[list[bytes]]], list[bytes]]] = {
    "unary_unary": (call_unary_unary, [b"3"]),
    "unary_stream": (call_unary_stream, [b"0", b"1", b"2"]),
    "stream_unary": (call_stream_unary, [b"6"]),
    "stream_stream": (call_stream_stream, [b"3", b"3"]),
}


@pytest.mark.parametrize("kind", CALLS)
async def test_a_member_is_served(kind: str) -> None:
    call, expected = CALLS[kind]
    async with served() as (address, kinds, refused), open_channel(address) as channel:
        assert await call(channel, secret_metadata(SECRET), b"3") == expected
        assert kinds.served == [kind]
        assert refused == []


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("metadata", [NO_PROOF, WRONG_PROOF], ids=["without_proof", "wrong_proof"])
async def test_a_stranger_is_refused_before_anything_is_parsed_or_served(kind: str, metadata: Metadata) -> None:
    async with served() as (address, kinds, refused), open_channel(address) as channel:
        for data in (b"3", b"no number"):
            assert await stranger_code(channel, kind, metadata, data) is grpc.StatusCode.UNAUTHENTICATED
        assert len(refused) == 2, "each refusal is counted once"
        assert (kinds.parsed, kinds.served) == ([], [])


async def test_a_stranger_beside_a_member_on_one_server_harms_nobody() -> None:
    async with served() as (address, kinds, refused), open_channel(address) as channel:

        async def member(kind: str) -> None:
            call, expected = CALLS[kind]
            assert await call(channel, secret_metadata(SECRET), b"3") == expected

        async def stranger(kind: str) -> None:
            assert await stranger_code(channel, kind, WRONG_PROOF, b"3") is grpc.StatusCode.UNAUTHENTICATED

        await asyncio.gather(*[who(kind) for _ in range(10) for kind in CALLS for who in (member, stranger)])
        assert sorted(kinds.served) == sorted(list(CALLS) * 10)
        assert len(refused) == 40


async def test_a_proof_said_twice_counts_only_if_the_last_one_is_right() -> None:
    """Whatever a middle box adds, there is one answer, and never a crash."""
    right, wrong = secret_metadata(SECRET)[0], (PROOF_KEY, "0" * 64)
    async with served() as (address, kinds, _), open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_unary_unary(channel, (right, wrong), b"3")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert kinds.served == []


async def test_health_is_open_for_a_check_and_for_a_watch() -> None:
    async with served() as (address, _, refused), open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        first = await watch.read()
        assert isinstance(first, health_pb2.HealthCheckResponse)
        assert first.status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        assert refused == []
