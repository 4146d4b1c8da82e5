"""The control link between one receiving and one sending worker: framing, handshake, authenticated messages, heartbeats.

It must not know handoffs: it hands checked messages to a callback and says once why it ended. A message is a 4-byte length,
JSON and, after the handshake, a 16-byte MAC over a counter and the JSON; lengths are bytes and bounded, times are seconds.

Handshake: Hello → Challenge → Proof → Proof+Welcome → Welcome. The dialler proves itself first, so the listening port never
gives a stranger anything to guess the secret from; layouts and data-plane descriptions travel under the session key only.
"""

from __future__ import annotations

import asyncio
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from common.clock import Clock
from common.errors import BatonError, HandoffFailed, LayoutMismatch
from kvtransfer.authentication import (
    MAC_BYTES,
    SessionKeys,
    check_secret,
    message_mac,
    new_nonce,
    proof,
    proof_is_right,
    session_keys,
    transcript_of,
)
from kvtransfer.layout import KVLayout
from kvtransfer.messages import (
    PROTOCOL_VERSION,
    Challenge,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    MessageError,
    Proof,
    Reject,
    Welcome,
    decode,
    encode,
    short_reason,
)
from kvtransfer.settings import FabricSettings

_HANDSHAKE_BYTES_MAX = 4096
_LENGTH = struct.Struct(">I")
_GOODBYE_S = 0.2
_M = TypeVar("_M")


class LinkFault(Exception):
    """What ends a link: the other side is no peer of ours, or it spoke wrongly. Becomes a reason, never crosses a border."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


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
        if self.slab_bytes < self.layout.block_bytes:
            raise ValueError(f"a slab of {self.slab_bytes} bytes cannot hold a block of {self.layout.block_bytes} bytes")


class Link:
    """An authenticated connection. `run` reads until it ends; `send` never waits and never raises for a dead peer."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        welcome: Welcome,
        keys: SessionKeys,
        *,
        dialled: bool,
        settings: FabricSettings,
        clock: Clock,
    ) -> None:
        self.peer = peer
        self.welcome = welcome
        self.frame_key = keys.frames
        self.close_reason: str | None = None
        self._reader = reader
        self._writer = writer
        self._settings = settings
        self._clock = clock
        self._send_key = keys.dialler if dialled else keys.listener
        self._receive_key = keys.listener if dialled else keys.dialler
        self._num_sent = 0
        self._num_received = 0
        self._heard_s = clock.monotonic()
        self._ticked_s = self._heard_s
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self.close_reason is None

    @property
    def silence_s(self) -> float:
        """Seconds since the peer was last heard."""
        return self._clock.monotonic() - self._heard_s

    def send(self, message: Message) -> bool:
        """Queues a message; False if the link has ended. A peer that does not read for too many bytes ends the link."""
        if self.close_reason is not None:
            return False
        payload = encode(message)
        mac = message_mac(self._send_key, self._num_sent, payload)
        self._num_sent += 1
        self._writer.write(_LENGTH.pack(len(payload) + MAC_BYTES) + payload + mac)
        queued = self._writer.transport.get_write_buffer_size()
        if queued > self._settings.write_buffer_bytes_max:
            self.abort(f"the peer does not read: {queued} bytes are queued")
            return False
        return True

    async def run(self, on_message: Callable[[Link, Message], None]) -> str:
        """Reads messages until the link ends, however it ends; returns the reason. Cancelling it ends the link."""
        self._ticked_s = self._heard_s = self._clock.monotonic()
        self._tick()
        try:
            while self.close_reason is None:
                message = await self._receive()
                if isinstance(message, Goodbye):
                    self.abort(f"the peer said goodbye: {message.reason}")
                elif not isinstance(message, Heartbeat):
                    on_message(self, message)
        except LinkFault as fault:
            self.abort(fault.reason)
        except (OSError, EOFError) as error:
            self.abort(f"connection lost: {type(error).__name__}")
        finally:
            self.abort("cancelled")
        assert self.close_reason is not None
        return self.close_reason

    async def close(self, reason: str) -> None:
        """Says goodbye, gives the last bytes a moment to leave, and ends the link."""
        if self.send(Goodbye(short_reason(reason))):
            self._end(reason)
            self._writer.close()
            try:
                async with asyncio.timeout(_GOODBYE_S):
                    await self._writer.wait_closed()
            except (TimeoutError, OSError):
                pass
            finally:
                self._writer.transport.abort()

    def abort(self, reason: str) -> None:
        """Ends the link at once, without goodbye. Only the first reason counts."""
        self._end(reason)
        self._writer.transport.abort()

    def _end(self, reason: str) -> None:
        if self.close_reason is None:
            self.close_reason = reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _receive(self) -> Message:
        data = await _read_frame(self._reader, self._settings.message_bytes_max)
        payload, mac = data[:-MAC_BYTES], data[-MAC_BYTES:]
        if len(data) <= MAC_BYTES or not _equal(message_mac(self._receive_key, self._num_received, payload), mac):
            raise LinkFault("Unauthenticated", f"message {self._num_received} does not carry the session's MAC")
        self._num_received += 1
        self._heard_s = self._clock.monotonic()
        return _decode(payload)

    def _tick(self) -> None:
        """Heartbeat and watch. A stall of our own event loop is not the peer's silence: it buys the peer one more beat."""
        if self.close_reason is not None:
            return
        now = self._clock.monotonic()
        beat_s, suspect_s = self._settings.heartbeat_s, self._settings.suspect_s
        stalled = now - self._ticked_s > 2 * beat_s
        self._ticked_s = now
        silence_s = now - self._heard_s
        if silence_s >= suspect_s and not stalled:
            self.abort(f"nothing heard of the peer for {silence_s:.2f} s")
            return
        if self.send(Heartbeat()):
            delay_s = min(beat_s, max(suspect_s - silence_s, beat_s / 4))
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)


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
    _write_frame(writer, hello)
    challenge_bytes = await _read_frame(reader, _HANDSHAKE_BYTES_MAX)
    challenge = _expect(Challenge, _decode(challenge_bytes))
    try:
        _check_version(challenge.version)
        if challenge.worker != peer:
            raise LinkFault("HandoffFailed", f"{challenge.worker} answers there, not {peer}")
    except LinkFault as fault:
        _write_frame(writer, encode(Reject(fault.kind, short_reason(fault.reason))))
        raise
    transcript = transcript_of(hello, challenge_bytes)
    _write_frame(writer, encode(Proof(proof(identity.secret, "dialler", transcript))))
    answer = _expect(Proof, _decode(await _read_frame(reader, _HANDSHAKE_BYTES_MAX)))
    if not proof_is_right(identity.secret, "listener", transcript, answer.proof):
        raise LinkFault("Unauthenticated", "the peer does not know the cluster secret")
    keys = session_keys(identity.secret, transcript)
    # A link object exists before the welcome is known, only to read and write under the session key.
    draft = Link(reader, writer, peer, _own_welcome(identity, peer), keys, dialled=True, settings=settings, clock=clock)
    draft.send(_own_welcome(identity, peer))
    welcome = _expect(Welcome, await draft._receive())
    _check_welcome(identity, welcome)
    draft.welcome = welcome
    return draft


async def _accept_handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: LinkIdentity, settings: FabricSettings, clock: Clock
) -> Link:
    draft: Link | None = None
    try:
        hello_bytes = await _read_frame(reader, _HANDSHAKE_BYTES_MAX)
        hello = _expect(Hello, _decode(hello_bytes))
        _check_version(hello.version)
        challenge = encode(Challenge(PROTOCOL_VERSION, identity.worker, new_nonce()))
        _write_frame(writer, challenge)
        transcript = transcript_of(hello_bytes, challenge)
        claimed = _expect(Proof, _decode(await _read_frame(reader, _HANDSHAKE_BYTES_MAX)))
        if not proof_is_right(identity.secret, "dialler", transcript, claimed.proof):
            raise LinkFault("Unauthenticated", f"{hello.worker} does not know the cluster secret")
        _write_frame(writer, encode(Proof(proof(identity.secret, "listener", transcript))))
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
        welcome = _expect(Welcome, await draft._receive())
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
            _write_frame(writer, encode(reject))
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
    if mismatch is None and welcome.slab_bytes < identity.layout.block_bytes:
        mismatch = f"the peer's slabs have {welcome.slab_bytes} bytes, a block has {identity.layout.block_bytes}"
    if mismatch is not None:
        raise LinkFault("LayoutMismatch", mismatch)


def _expect(cls: type[_M], message: Message) -> _M:
    if isinstance(message, Reject):
        raise LinkFault(message.kind, f"the peer refuses: {message.reason}")
    if not isinstance(message, cls):
        raise LinkFault("Unauthenticated", f"{type(message).__name__} where {cls.__name__} belongs")
    return message


async def _read_frame(reader: asyncio.StreamReader, num_bytes_max: int) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if not 0 < length <= num_bytes_max:
        raise LinkFault("Unauthenticated", f"a message of {length} bytes; at most {num_bytes_max} are allowed")
    return await reader.readexactly(length)


def _write_frame(writer: asyncio.StreamWriter, payload: bytes) -> None:
    writer.write(_LENGTH.pack(len(payload)) + payload)


def _decode(payload: bytes) -> Message:
    try:
        return decode(payload)
    except MessageError as error:
        raise LinkFault("Unauthenticated", f"malformed message: {error}") from error


def _equal(one: bytes, other: bytes) -> bool:
    return hmac.compare_digest(one, other)
