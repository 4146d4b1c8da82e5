"""The messages of the control link: plain values, their JSON form, and the checks that every received byte passes.

It must not know sockets, keys or handoff states. Sizes are bytes, epochs and indexes are non-negative integers, and no
field is unbounded: what `decode` returns has been checked field by field, and anything else raises MessageError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from common.ids import ID_LENGTH_MAX

PROTOCOL_VERSION = 1
EXTRA_BYTES_MAX = 16 * 1024
"""The closing announcement's `extra`, as JSON."""
REASON_LENGTH_MAX = 512
RENEWALS_MAX = 256
"""Handoffs in one Renew message."""
FRAMES_MAX = 1 << 20
DESCRIPTION_BYTES_MAX = 64 * 1024

_INT64_MAX = (1 << 63) - 1


class MessageError(ValueError):
    """Bytes that are no valid message; the link they came on is closed."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message, from the dialling (receiving) worker. `worker` is id@incarnation."""

    version: int
    worker: str
    nonce: str


@dataclass(frozen=True, slots=True)
class Challenge:
    """The listening (sending) worker's answer to Hello."""

    version: int
    worker: str
    nonce: str


@dataclass(frozen=True, slots=True)
class Proof:
    proof: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """First message under the session key, both ways. `description` is the data plane's, hex; empty from the dialler."""

    peer: str
    layout: Mapping[str, Any]
    scheme: str
    slab_bytes: int
    region_bytes: int
    description: str


@dataclass(frozen=True, slots=True)
class Reject:
    """The handshake ends here, with the reason for the other side's log."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    pass


@dataclass(frozen=True, slots=True)
class Goodbye:
    reason: str


@dataclass(frozen=True, slots=True)
class Open:
    """Receiver → sender: blocks from `first_block_index` on are wanted."""

    handoff_id: str
    epoch: int
    num_prompt_tokens: int
    first_block_index: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Sender → receiver: blocks [first_block_index, +num_blocks) lie in the slab at `offset`, ready to be read.

    `digest` covers the payload, the handoff, the epoch, the block indexes and the layout, under a key of the session.
    """

    handoff_id: str
    epoch: int
    frame_index: int
    first_block_index: int
    num_blocks: int
    num_bytes: int
    offset: int
    digest: str


@dataclass(frozen=True, slots=True)
class Closing:
    """Sender → receiver: all frames are announced; token 0 and all that decode needs to go on."""

    handoff_id: str
    epoch: int
    num_frames: int
    first_token_id: int
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ack:
    """Receiver → sender: the frame is stored and verified, its slab is free."""

    handoff_id: str
    epoch: int
    frame_index: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Receiver → sender: the final acknowledgement."""

    handoff_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Receiver → sender: this handoff will never be opened."""

    handoff_id: str
    epoch: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Either way: the handoff is over; the other end settles. `kind` is of the error table."""

    handoff_id: str
    epoch: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Settled:
    """Receiver → sender after an abort: no read of the handoff's slabs is running any more."""

    handoff_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Either way: these handoffs (id, epoch) are alive at this end, however slow they are."""

    handoffs: tuple[tuple[str, int], ...]


HandoffMessage = Open | Announce | Closing | Ack | Committed | Refuse | Abort | Settled
Message = Hello | Challenge | Proof | Welcome | Reject | Heartbeat | Goodbye | Renew | HandoffMessage

_TYPES: dict[str, type[Any]] = {
    "hello": Hello,
    "challenge": Challenge,
    "proof": Proof,
    "welcome": Welcome,
    "reject": Reject,
    "heartbeat": Heartbeat,
    "goodbye": Goodbye,
    "open": Open,
    "announce": Announce,
    "closing": Closing,
    "ack": Ack,
    "committed": Committed,
    "refuse": Refuse,
    "abort": Abort,
    "settled": Settled,
    "renew": Renew,
}
_NAMES = {cls: name for name, cls in _TYPES.items()}


def _integer(low: int, high: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not int or not low <= value <= high:
            raise MessageError(f"must be an integer in [{low}, {high}]")
        return value

    return check


def _text(length_max: int, *, length_min: int = 1) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not str or not length_min <= len(value) <= length_max:
            raise MessageError(f"must be a text of {length_min} to {length_max} characters")
        return value

    return check


def _hex(num_bytes_min: int, num_bytes_max: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not str or not 2 * num_bytes_min <= len(value) <= 2 * num_bytes_max:
            raise MessageError(f"must be the hex form of {num_bytes_min} to {num_bytes_max} bytes")
        try:
            bytes.fromhex(value)
        except ValueError as error:
            raise MessageError("must be hex digits") from error
        return value

    return check


def _json_object(value: Any) -> Any:
    if not isinstance(value, Mapping) or any(type(key) is not str for key in value):
        raise MessageError("must be a JSON object")
    try:
        size = len(json.dumps(value, allow_nan=False, separators=(",", ":")))
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(f"must be plain JSON: {error}") from error
    if size > EXTRA_BYTES_MAX:
        raise MessageError(f"takes {size} bytes of JSON, at most {EXTRA_BYTES_MAX} are allowed")
    return value


def _renewals(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) > RENEWALS_MAX:
        raise MessageError(f"must be a list of at most {RENEWALS_MAX} pairs")
    pairs = []
    for pair in value:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise MessageError("must be a list of (handoff id, epoch) pairs")
        pairs.append((_text(ID_LENGTH_MAX)(pair[0]), _integer(0, _INT64_MAX)(pair[1])))
    return tuple(pairs)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "version": _integer(0, 1 << 16),
    "worker": _text(2 * ID_LENGTH_MAX),
    "peer": _text(2 * ID_LENGTH_MAX),
    "nonce": _hex(32, 32),
    "proof": _hex(32, 32),
    "layout": _json_object,
    "scheme": _text(16),
    "slab_bytes": _integer(1, 1 << 40),
    "region_bytes": _integer(1, 1 << 46),
    "description": _hex(0, DESCRIPTION_BYTES_MAX),
    "kind": _text(64),
    "reason": _text(REASON_LENGTH_MAX, length_min=0),
    "handoff_id": _text(ID_LENGTH_MAX),
    "epoch": _integer(0, _INT64_MAX),
    "num_prompt_tokens": _integer(1, 1 << 31),
    "first_block_index": _integer(0, 1 << 31),
    "num_blocks": _integer(1, 1 << 31),
    "num_bytes": _integer(1, 1 << 40),
    "offset": _integer(0, 1 << 46),
    "frame_index": _integer(0, FRAMES_MAX),
    "num_frames": _integer(0, FRAMES_MAX),
    "digest": _hex(16, 16),
    "first_token_id": _integer(0, (1 << 32) - 1),
    "extra": _json_object,
    "handoffs": _renewals,
}


def _checked(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    names = [item.name for item in fields(cls)]
    if set(values) != set(names):
        raise MessageError(
            f"{_NAMES[cls]} must have exactly the fields {names}, not {sorted(map(str, values))}"[:REASON_LENGTH_MAX]
        )
    result = {}
    for name in names:
        try:
            result[name] = _CHECKS[name](values[name])
        except MessageError as error:
            raise MessageError(f"{_NAMES[cls]}.{name} {error}") from error
    return result


def encode(message: Message) -> bytes:
    """JSON bytes. Raises MessageError for a value that the other side would refuse, which is a bug at this end."""
    cls = type(message)
    values = _checked(cls, {item.name: getattr(message, item.name) for item in fields(cls)})
    return json.dumps({"type": _NAMES[cls], **values}, allow_nan=False, separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """The message in `data`. Raises MessageError for everything else, whatever the bytes are."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{len(data)} bytes are no JSON: {str(error)[:100]}") from error
    if not isinstance(value, dict):
        raise MessageError("a message must be a JSON object")
    name = value.pop("type", None)
    cls = _TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise MessageError(f"unknown message type {str(name)[:40]!r}")
    message: Message = cls(**_checked(cls, value))
    return message


def short_reason(reason: str) -> str:
    """A reason cut to what the wire allows."""
    return reason[:REASON_LENGTH_MAX]


def _refuse_constant(name: str) -> Any:
    raise MessageError(f"{name} is no JSON number")
