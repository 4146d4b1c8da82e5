"""How a control link comes to be: two workers prove to each other that they know the cluster secret, then compare layouts.

It must not know handoffs. Hello → Challenge → Proof → Proof+Welcome → Welcome. The dialler proves itself first, so the
listening port never gives a stranger anything to guess the secret from; layouts and data-plane descriptions travel under the
session key only. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from common.clock import Clock
from common.errors import BatonError, HandoffFailed, LayoutMismatch
from kvtransfer.authentication import check_secret, new_nonce, proof, proof_is_right, session_keys, transcript_of
from kvtransfer.layout import KVLayout
from kvtransfer.link import Link
from kvtransfer.link_framing import LinkFault, decode_message, read_frame, write_frame
from kvtransfer.messages import PROTOCOL_VERSION, Challenge, Hello, Message, Proof, Reject, Welcome, encode, short_reason
from kvtransfer.settings import FabricSettings

_HANDSHAKE_BYTES_MAX = 4096
_M = TypeVar("_M")


@dataclass(frozen=True, slots=True)
class LinkIdentity:
    """What this end says of itself. `description` is the data plane's; empty on the receiving end."""

    worker: str
    secret: bytes
    layout: KVLayout
    scheme: str
    slab_bytes: int
    region_bytes: int
    description: bytes = b""

    def __post_init__(self) -> None:
        check_secret(self.secret)
        if self.slab_bytes < self.layout.wire_block_bytes:
            raise ValueError(f"a slab of {self.slab_bytes} bytes cannot hold a block of {self.layout.wire_block_bytes} bytes")


async def dial(address: str, peer: str, identity: LinkIdentity, settings: FabricSettings, clock: Clock) -> Link:
    """Connects to the sending worker `peer` at host:port.

    Raises LayoutMismatch if the two cannot exchange blocks, HandoffFailed for everything else; both with the reason.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise HandoffFailed(f"the address of {peer} is no host:port: {address[:100]!r}")
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(settings.connect_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=settings.message_bytes_max + 4)
            link = await _dial_handshake(reader, writer, peer, identity, settings, clock)
            writer = None
            return link
    except LinkFault as fault:
        message = f"no link to {peer} at {address}: {fault.reason}"
        error: BatonError = LayoutMismatch(message) if fault.kind == "LayoutMismatch" else HandoffFailed(message)
        raise error from fault
    except TimeoutError as error:
        raise HandoffFailed(f"no link to {peer} at {address} within {settings.connect_s:g} s") from error
    except (OSError, EOFError, OverflowError) as error:
        raise HandoffFailed(f"no link to {peer} at {address}: {type(error).__name__}: {error}") from error
    finally:
        if writer is not None:
            writer.close()


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: LinkIdentity, settings: FabricSettings, clock: Clock
) -> Link:
    """The listening end of the handshake. Raises LinkFault with the reason, which the dialler is told where possible."""
    try:
        async with asyncio.timeout(settings.handshake_s):
            return await _accept_handshake(reader, writer, identity, settings, clock)
    except TimeoutError as error:
        raise LinkFault("Unauthenticated", f"no handshake within {settings.handshake_s:g} s") from error
    except (OSError, EOFError) as error:
        raise LinkFault("Unauthenticated", f"connection lost in the handshake: {type(error).__name__}") from error


async def _dial_handshake(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    peer: str,
    identity: LinkIdentity,
    settings: FabricSettings,
    clock: Clock,
) -> Link:
    hello = encode(Hello(PROTOCOL_VERSION, identity.worker, new_nonce()))
    write_frame(writer, hello)
    challenge_bytes = await read_frame(reader, _HANDSHAKE_BYTES_MAX)
    challenge = _expect(Challenge, decode_message(challenge_bytes))
    try:
        _check_version(challenge.version)
        if challenge.worker != peer:
            raise LinkFault("HandoffFailed", f"{challenge.worker} answers there, not {peer}")
    except LinkFault as fault:
        write_frame(writer, encode(Reject(fault.kind, short_reason(fault.reason))))
        raise
    transcript = transcript_of(hello, challenge_bytes)
    write_frame(writer, encode(Proof(proof(identity.secret, "dialler", transcript))))
    answer = _expect(Proof, decode_message(await read_frame(reader, _HANDSHAKE_BYTES_MAX)))
    if not proof_is_right(identity.secret, "listener", transcript, answer.proof):
        raise LinkFault("Unauthenticated", "the peer does not know the cluster secret")
    keys = session_keys(identity.secret, transcript)
    # A link object exists before the welcome is known, only to read and write under the session key.
    draft = Link(reader, writer, peer, _own_welcome(identity, peer), keys, dialled=True, settings=settings, clock=clock)
    draft.send(_own_welcome(identity, peer))
    welcome = _expect(Welcome, await draft.receive())
    _check_welcome(identity, welcome)
    draft.welcome = welcome
    return draft


async def _accept_handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: LinkIdentity, settings: FabricSettings, clock: Clock
) -> Link:
    draft: Link | None = None
    try:
        hello_bytes = await read_frame(reader, _HANDSHAKE_BYTES_MAX)
        hello = _expect(Hello, decode_message(hello_bytes))
        _check_version(hello.version)
        challenge = encode(Challenge(PROTOCOL_VERSION, identity.worker, new_nonce()))
        write_frame(writer, challenge)
        transcript = transcript_of(hello_bytes, challenge)
        claimed = _expect(Proof, decode_message(await read_frame(reader, _HANDSHAKE_BYTES_MAX)))
        if not proof_is_right(identity.secret, "dialler", transcript, claimed.proof):
            raise LinkFault("Unauthenticated", f"{hello.worker} does not know the cluster secret")
        write_frame(writer, encode(Proof(proof(identity.secret, "listener", transcript))))
        keys = session_keys(identity.secret, transcript)
        draft = Link(
            reader,
            writer,
            hello.worker,
            _own_welcome(identity, hello.worker),
            keys,
            dialled=False,
            settings=settings,
            clock=clock,
        )
        welcome = _expect(Welcome, await draft.receive())
        if welcome.peer != identity.worker:
            raise LinkFault("HandoffFailed", f"{hello.worker} wants {welcome.peer}, this is {identity.worker}")
        _check_welcome(identity, welcome)
        draft.send(_own_welcome(identity, hello.worker))
        draft.welcome = welcome
        return draft
    except LinkFault as fault:
        reject = Reject(fault.kind, short_reason(fault.reason))
        if draft is not None:
            draft.send(reject)
        else:
            write_frame(writer, encode(reject))
        raise


def _own_welcome(identity: LinkIdentity, peer: str) -> Welcome:
    return Welcome(
        peer, identity.layout.to_wire(), identity.scheme, identity.slab_bytes, identity.region_bytes, identity.description.hex()
    )


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise LinkFault("LayoutMismatch", f"protocol version {PROTOCOL_VERSION} here, {version} there")


def _check_welcome(identity: LinkIdentity, welcome: Welcome) -> None:
    """Both ends check, so both know the reason, even if the other end is older or broken."""
    try:
        mismatch = identity.layout.explain_mismatch(KVLayout.from_wire(dict(welcome.layout)))
    except LayoutMismatch as error:
        mismatch = error.message
    if mismatch is None and welcome.scheme != identity.scheme:
        mismatch = f"data plane {identity.scheme} here, {welcome.scheme} there"
    if mismatch is None and welcome.slab_bytes < identity.layout.wire_block_bytes:
        mismatch = f"the peer's slabs have {welcome.slab_bytes} bytes, a block has {identity.layout.wire_block_bytes}"
    if mismatch is not None:
        raise LinkFault("LayoutMismatch", mismatch)


def _expect(cls: type[_M], message: Message) -> _M:
    if isinstance(message, Reject):
        raise LinkFault(message.kind, f"the peer refuses: {message.reason}")
    if not isinstance(message, cls):
        raise LinkFault("Unauthenticated", f"{type(message).__name__} where {cls.__name__} belongs")
    return message
