"""Opens a connection of the tcp plane: both ends prove that they know the cluster secret before any byte is served.

A challenge-response over HMAC-SHA-256, bound to the one listener that the description named, so that an answer cannot be
replayed and another process on a reused port is noticed. It must not know regions or fetches. Confidentiality is not its
business; the payload's integrity is checked by the frame digests of the control link.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket

LISTENER_ID_BYTES = 16
_HELLO = b"BTN\x01"
"""mark and version"""
_NONCE_BYTES = 16
_MAC_BYTES = 32
_ACCEPTED = b"\x06"


async def prove_as_client(sock: socket.socket, key: bytes, listener_id: bytes) -> None:
    """Raises PermissionError when the other end fails the proof, OSError when it goes away. The caller sets the deadline."""
    loop = asyncio.get_running_loop()
    nonce = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(sock, _HELLO + nonce)
    answer = await receive_exactly(sock, _NONCE_BYTES + _MAC_BYTES)
    nonces = nonce + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _mac(key, b"server", listener_id, nonces)):
        raise PermissionError("the other end is not the listener that was described, or has another cluster secret")
    await loop.sock_sendall(sock, _mac(key, b"client", listener_id, nonces))
    if await receive_exactly(sock, len(_ACCEPTED)) != _ACCEPTED:
        raise PermissionError("the listener did not accept the proof")


async def prove_as_server(sock: socket.socket, key: bytes, listener_id: bytes) -> None:
    """The listener's half; the same errors."""
    loop = asyncio.get_running_loop()
    hello = await receive_exactly(sock, len(_HELLO) + _NONCE_BYTES)
    if hello[: len(_HELLO)] != _HELLO:
        raise PermissionError("the connection does not begin with the expected mark and version")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    nonces = hello[len(_HELLO) :] + nonce
    await loop.sock_sendall(sock, nonce + _mac(key, b"server", listener_id, nonces))
    if not hmac.compare_digest(await receive_exactly(sock, _MAC_BYTES), _mac(key, b"client", listener_id, nonces)):
        raise PermissionError("the client does not know the cluster secret")
    await loop.sock_sendall(sock, _ACCEPTED)


async def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    await receive_into(sock, memoryview(data))
    return bytes(data)


async def receive_into(sock: socket.socket, target: memoryview, step_bytes: int = 1 << 20) -> None:
    """Fills `target` from the socket, straight from the kernel. One turn of the event loop copies at most `step_bytes`."""
    loop = asyncio.get_running_loop()
    at = 0
    while at < len(target):
        got = await loop.sock_recv_into(sock, target[at : at + step_bytes])
        if got == 0:
            raise ConnectionResetError(f"the connection ended after {at} of {len(target)} bytes")
        at += got


def _mac(key: bytes, side: bytes, listener_id: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, side + listener_id + nonces, hashlib.sha256).digest()
