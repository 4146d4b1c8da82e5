"""What a data plane tells its peers about its region: a small versioned envelope, sealed with the cluster secret.

The seal (keyed BLAKE2b) covers every byte, so a truncated, damaged or foreign description is refused before any of it
reaches a transport library: one flipped byte in UCX metadata can break the connection to a healthy peer. It must not
know what the fields mean; each plane packs its own.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from common.errors import HandoffFailed

DESCRIPTION_MAX_BYTES = 64 * 1024
"""The bound that the control link allows for."""

_VERSION = 1
_HEAD = struct.Struct("!4sB8sI")
"""magic, version, scheme (padded with zeros), number of payload bytes"""
_MAGIC = b"BTNR"
_SEAL_BYTES = 32


def seal_description(scheme: str, secret: bytes, payload: bytes) -> bytes:
    """Wraps a plane's own fields for the way to a peer. Raises HandoffFailed when they exceed the bound."""
    head = _HEAD.pack(_MAGIC, _VERSION, scheme.encode(), len(payload))
    sealed = head + payload + _seal(secret, head + payload)
    if len(sealed) > DESCRIPTION_MAX_BYTES:
        raise HandoffFailed(f"description of {len(sealed)} bytes exceeds {DESCRIPTION_MAX_BYTES}")
    return sealed


def open_description(scheme: str, secret: bytes, description: bytes) -> bytes:
    """Returns the payload that `seal_description` was given. Raises HandoffFailed with the reason and changes nothing."""
    size = len(description)
    if not _HEAD.size + _SEAL_BYTES <= size <= DESCRIPTION_MAX_BYTES:
        raise HandoffFailed(f"peer description has {size} bytes, outside of {_HEAD.size + _SEAL_BYTES}..{DESCRIPTION_MAX_BYTES}")
    magic, version, name, payload_bytes = _HEAD.unpack_from(description)
    if magic != _MAGIC:
        raise HandoffFailed("peer description does not start with the expected mark")
    if version != _VERSION:
        raise HandoffFailed(f"peer description has version {version}, this worker speaks {_VERSION}")
    other = name.rstrip(b"\0").decode(errors="replace")
    if other != scheme:
        raise HandoffFailed(f"peer offers the {other!r} data plane, this worker uses {scheme!r}")
    body, seal = description[:-_SEAL_BYTES], description[-_SEAL_BYTES:]
    if len(body) != _HEAD.size + payload_bytes or not hmac.compare_digest(seal, _seal(secret, body)):
        raise HandoffFailed("peer description is damaged or sealed with another cluster secret")
    return body[_HEAD.size :]


def plane_key(secret: bytes, purpose: bytes) -> bytes:
    """A 32-byte key for one purpose (at most 16 bytes of name), so that no two uses of the cluster secret share a key."""
    return hashlib.blake2b(secret, digest_size=32, person=purpose).digest()


def _seal(secret: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_SEAL_BYTES, key=plane_key(secret, b"baton-describe")).digest()
