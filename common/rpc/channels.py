"""How every gRPC channel and server of the system is set up, and how a caller proves that it belongs to the cluster.

Both ends agree on keepalive here: a server that sees more pings than it allows hangs up ("too many pings"). Messages are small (token
ids, never tensors), so one limit holds everywhere. The secret itself never travels: the proof is an HMAC over a fixed context.
"""

from __future__ import annotations

import hashlib
import hmac

import grpc

MESSAGE_BYTES_MAX = 16 << 20
"""A prompt of a million token ids is about 3 MiB packed."""

_KEEPALIVE_S = 10
_COMMON = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", _KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Each worker is its own endpoint: a shared subchannel pool would keep a dead incarnation's connection state alive.
    ("grpc.use_local_subchannel_pool", 1),
    # Workers are inside the cluster's network: a proxy from the environment (http_proxy) must not see or break these connections.
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    # Half of what the other end keeps to, so that jitter is never a strike. gRPC ignores unknown names in silence; a test looks.
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_S * 500),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers must never share a port by accident.
    ("grpc.so_reuseport", 0),
]

PROOF_KEY = "baton-cluster-proof"
_CONTEXT = b"baton cluster membership, grpc, version 1"


def cluster_proof(secret: bytes) -> str:
    """What a member of the cluster sends with each call; reveals nothing about the secret."""
    return hmac.new(secret, _CONTEXT, hashlib.sha256).hexdigest()


def secret_metadata(secret: bytes) -> tuple[tuple[str, str], ...]:
    return ((PROOF_KEY, cluster_proof(secret)),)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to host:port inside the cluster's network. Use as an async context manager."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
