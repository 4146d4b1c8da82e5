"""The gRPC set-up on both ends, over real channels: size limits, keepalive that agrees, proof of membership."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from common.rpc import serving_pb2 as pb
from common.rpc import serving_pb2_grpc as pb_grpc
from common.rpc.channels import (
    CHANNEL_OPTIONS,
    PROOF_KEY,
    SERVER_OPTIONS,
    cluster_proof,
    open_channel,
    secret_metadata,
)
from common.rpc.interceptors import ClusterGate

SECRET = b"the secret of this cluster"


class Echo(pb_grpc.WorkerServicer):
    """Answers each command of a session with one event per token id."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def Session(self, request_iterator: AsyncIterator[pb.Command], context: object) -> AsyncIterator[pb.Events]:
        self.num_calls += 1
        async for command in request_iterator:
            yield pb.Events(events=[pb.Event(tokens=pb.Tokens(token_ids=command.prefill.sequence.token_ids))])

    async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.WorkerDescription:
        self.num_calls += 1
        return pb.WorkerDescription(worker_id="w")


@asynccontextmanager
async def served(on_refused: Callable[[], None] = lambda: None) -> AsyncIterator[tuple[str, Echo]]:
    server = grpc.aio.server(interceptors=[ClusterGate(SECRET, on_refused)], options=SERVER_OPTIONS)
    echo = Echo()
    pb_grpc.add_WorkerServicer_to_server(echo, server)  # type: ignore[no-untyped-call]
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", echo
    finally:
        await server.stop(None)


def prefill(num_tokens: int) -> pb.Command:
    return pb.Command(prefill=pb.Prefill(sequence=pb.SequenceSpec(token_ids=[151_935] * num_tokens)))


async def test_a_prompt_of_a_million_ids_fits_both_ways() -> None:
    async with served() as (address, _), open_channel(address) as channel:
        call = pb_grpc.WorkerStub(channel).Session(metadata=secret_metadata(SECRET))
        await call.write(prefill(1_000_000))
        events = await call.read()
        assert isinstance(events, pb.Events)
        assert len(events.events[0].tokens.token_ids) == 1_000_000
        call.cancel()


async def test_a_message_over_the_limit_ends_its_own_call_alone() -> None:
    async with served() as (address, _), open_channel(address) as channel:
        stub = pb_grpc.WorkerStub(channel)
        call, neighbour = (stub.Session(metadata=secret_metadata(SECRET)) for _ in range(2))
        await neighbour.write(prefill(1))
        with pytest.raises((grpc.aio.AioRpcError, grpc.aio.UsageError)):
            await call.write(prefill(6_000_000))
            await call.read()
        assert await call.code() is not grpc.StatusCode.OK
        await neighbour.write(prefill(1))
        assert [isinstance(await neighbour.read(), pb.Events) for _ in range(2)] == [True, True]
        neighbour.cancel()


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        secret_metadata(b"the secret of another cluster"),
        ((PROOF_KEY, ""),),
        ((PROOF_KEY, SECRET.decode()),),
        ((PROOF_KEY, cluster_proof(SECRET)[:-1]),),
        ((PROOF_KEY + "-bin", cluster_proof(SECRET).encode()),),
    ],
)
async def test_a_call_without_the_clusters_proof_reaches_no_service(metadata: tuple[tuple[str, str | bytes], ...]) -> None:
    refused: list[None] = []
    async with served(lambda: refused.append(None)) as (address, echo), open_channel(address) as channel:
        stub = pb_grpc.WorkerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Describe(pb.DescribeRequest(), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            call = stub.Session(metadata=metadata)
            await call.read()
        assert unary.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert stream.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert SECRET.decode() not in str(unary.value)
        assert cluster_proof(SECRET) not in str(unary.value)
        assert (echo.num_calls, len(refused)) == (0, 2)


async def test_a_call_with_the_proof_is_served() -> None:
    async with served() as (address, _), open_channel(address) as channel:
        description = await pb_grpc.WorkerStub(channel).Describe(pb.DescribeRequest(), metadata=secret_metadata(SECRET))
        assert description.worker_id == "w"


async def test_health_answers_anybody() -> None:
    async with served() as (address, _), open_channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_an_unknown_method_is_unimplemented_not_a_crash() -> None:
    async with served() as (address, _), open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/baton.v1.Worker/Nothing")(b"", metadata=secret_metadata(SECRET))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_proxy_in_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with served() as (address, _), open_channel(address) as channel:
        stub = pb_grpc.WorkerStub(channel)
        assert (await stub.Describe(pb.DescribeRequest(), metadata=secret_metadata(SECRET), timeout=5)).worker_id == "w"


async def test_two_servers_cannot_share_a_port() -> None:
    async with served() as (address, _):
        other = grpc.aio.server(options=SERVER_OPTIONS)
        with pytest.raises(RuntimeError):
            other.add_insecure_port(address)
        await other.stop(None)


@pytest.mark.parametrize("name", sorted({name for name, _ in (*CHANNEL_OPTIONS, *SERVER_OPTIONS)}))
def test_grpc_knows_every_option_we_set(name: str) -> None:
    """An unknown option is ignored in silence; the names are constants inside the library."""
    assert name.encode() + b"\0" in Path(cygrpc.__file__).read_bytes()


def test_a_server_allows_the_pings_that_its_callers_send() -> None:
    """Fault A57: a caller that pings more often than the server permits is hung up on."""
    channel, server = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    assert channel["grpc.keepalive_time_ms"] >= 2 * server["grpc.http2.min_ping_interval_without_data_ms"]
    assert server["grpc.keepalive_permit_without_calls"] == channel["grpc.keepalive_permit_without_calls"] == 1
    assert server["grpc.http2.max_ping_strikes"] == 0


def test_the_proof_depends_on_the_secret_alone_and_does_not_contain_it() -> None:
    assert cluster_proof(SECRET) == cluster_proof(bytes(SECRET))
    assert cluster_proof(SECRET) != cluster_proof(SECRET + b"x")
    assert SECRET.hex() not in cluster_proof(SECRET)
