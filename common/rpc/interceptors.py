"""The server's gate: every call must prove cluster membership, the health service alone answers anybody.

Must not know services or messages.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from common.rpc.channels import PROOF_KEY, cluster_proof

OPEN_PREFIX = "/grpc.health.v1.Health/"


class ClusterGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the cluster's proof with UNAUTHENTICATED, before any message is parsed. Constant-time compare."""

    def __init__(self, secret: bytes, on_refused: Callable[[], None]) -> None:
        self._proof = cluster_proof(secret)
        self._on_refused = on_refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_PREFIX):
            return handler
        given = dict(handler_call_details.invocation_metadata or ()).get(PROOF_KEY, "")
        if isinstance(given, bytes):
            given = given.decode("latin-1")
        if hmac.compare_digest(given.encode(), self._proof.encode()):
            return handler
        self._on_refused()
        return _refusing(handler)


def _refusing(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same kind (stream or not on either side) that only says no. It has no deserializer: a stranger's bytes are not
    parsed, so that they cannot cost work or turn the refusal into another error.
    """

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not carry this cluster's proof")

    async def refuse_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await refuse(request, context)
        yield None  # never reached: makes this an async generator, as a streaming handler must be

    makers = {
        (False, False): (grpc.unary_unary_rpc_method_handler, refuse),
        (False, True): (grpc.unary_stream_rpc_method_handler, refuse_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, refuse),
        (True, True): (grpc.stream_stream_rpc_method_handler, refuse_stream),
    }
    make, behaviour = makers[handler.request_streaming, handler.response_streaming]
    return make(behaviour)
