"""How messages lie on a control connection: a 4-byte big-endian length, then that many bytes; and what ends such a connection.

It must not know links, keys or the order of messages. Lengths are bytes and bounded by the caller.
"""

from __future__ import annotations

import asyncio
import struct

from kvtransfer.messages import Message, MessageError, decode

_LENGTH = struct.Struct(">I")


class LinkFault(Exception):
    """What ends a link: the other side is no peer of ours, or it spoke wrongly. Becomes a reason, never crosses a border."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


async def read_frame(reader: asyncio.StreamReader, num_bytes_max: int) -> bytes:
    """The next frame without its length. Raises LinkFault for an impossible length, EOFError when the connection ends."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if not 0 < length <= num_bytes_max:
        raise LinkFault("Unauthenticated", f"a message of {length} bytes; at most {num_bytes_max} are allowed")
    return await reader.readexactly(length)


def write_frame(writer: asyncio.StreamWriter, payload: bytes) -> None:
    """Queues one frame; never waits."""
    writer.write(_LENGTH.pack(len(payload)) + payload)


def decode_message(payload: bytes) -> Message:
    """The checked message in a frame. Raises LinkFault for anything else."""
    try:
        return decode(payload)
    except MessageError as error:
        raise LinkFault("Unauthenticated", f"malformed message: {error}") from error
