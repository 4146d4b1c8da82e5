"""Keys and proofs of the control link: who may speak, that nobody changed a message, and what a frame's digest covers.

Both ends share the cluster secret and prove it by HMAC-SHA-256 over both nonces (challenge-response, RFC 2104); a key for
each direction is derived from the same transcript. It must not know sockets; the secret itself never crosses the wire.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from kvtransfer.messages import Announce

MAC_BYTES = 16
NONCE_BYTES = 32
SECRET_BYTES_MIN = 16
"""A shorter cluster secret could be guessed offline from one observed handshake."""


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """`dialler` signs what the dialling end sends, `listener` the other direction, `frames` the frame digests."""

    dialler: bytes
    listener: bytes
    frames: bytes


def check_secret(secret: bytes) -> bytes:
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(f"the cluster secret has {len(secret)} bytes; at least {SECRET_BYTES_MIN} are needed")
    return secret


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def transcript_of(hello: bytes, challenge: bytes) -> bytes:
    """Binds versions, worker names and nonces of both ends; each part is hashed alone, so borders cannot shift."""
    return hashlib.sha256(hashlib.sha256(hello).digest() + hashlib.sha256(challenge).digest()).digest()


def proof(secret: bytes, role: str, transcript: bytes) -> str:
    """What `role` (dialler or listener) sends to show that it knows the secret. The roles differ, so no proof reflects."""
    return hmac.digest(secret, b"baton-kv-proof:" + role.encode() + b":" + transcript, "sha256").hex()


def proof_is_right(secret: bytes, role: str, transcript: bytes, claimed: str) -> bool:
    return hmac.compare_digest(proof(secret, role, transcript), claimed)


def session_keys(secret: bytes, transcript: bytes) -> SessionKeys:
    def derive(label: bytes) -> bytes:
        return hmac.digest(secret, b"baton-kv-key:" + label + b":" + transcript, "sha256")

    return SessionKeys(derive(b"dialler"), derive(b"listener"), derive(b"frames"))


def message_mac(key: bytes, sequence: int, payload: bytes) -> bytes:
    """`sequence` counts the messages of one direction, so a replayed, dropped or reordered one does not verify."""
    return hmac.digest(key, struct.pack(">Q", sequence) + payload, "sha256")[:MAC_BYTES]


def frame_digest(key: bytes, fingerprint: str, frame: Announce, payload_digest: bytes) -> str:
    """Hex digest of a frame's payload digest together with all that says where the payload belongs.

    The announced slab offset is left out: it says where to read, not what. `frame.digest` itself is not used.
    """
    place = f"{fingerprint}|{frame.epoch}|{frame.frame_index}|{frame.first_block_index}|{frame.num_blocks}|{frame.num_bytes}|"
    data = place.encode() + frame.handoff_id.encode() + b"|" + payload_digest
    return hashlib.blake2b(data, digest_size=16, key=key, person=b"baton-kv-frame").hexdigest()
