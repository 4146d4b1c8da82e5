"""The control link between one receiving and one sending worker, once it is set up: authenticated messages and heartbeats.

It must not know handoffs: it hands checked messages to a callback and says once why it ended. A frame holds a message's JSON
and a 16-byte MAC over a counter and the JSON; sizes are bytes, times are seconds. `link_handshake` makes links.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

from common.clock import Clock
from kvtransfer.authentication import MAC_BYTES, SessionKeys, message_mac
from kvtransfer.link_framing import LinkFault, decode_message, read_frame, write_frame
from kvtransfer.messages import Goodbye, Heartbeat, Message, Welcome, encode, short_reason
from kvtransfer.settings import FabricSettings

_GOODBYE_S = 0.2


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
        write_frame(self._writer, payload + mac)
        queued = self._writer.transport.get_write_buffer_size()
        if queued > self._settings.write_buffer_bytes_max:
            self.abort(f"the peer does not read: {queued} bytes are queued")
            return False
        return True

    async def receive(self) -> Message:
        """The next message, which carries the session's MAC. For the handshake; later only `run` reads.

        Raises LinkFault, or OSError or EOFError when the connection is lost.
        """
        data = await read_frame(self._reader, self._settings.message_bytes_max)
        payload, mac = data[:-MAC_BYTES], data[-MAC_BYTES:]
        if len(data) <= MAC_BYTES or not hmac.compare_digest(message_mac(self._receive_key, self._num_received, payload), mac):
            raise LinkFault("Unauthenticated", f"message {self._num_received} does not carry the session's MAC")
        self._num_received += 1
        self._heard_s = self._clock.monotonic()
        return decode_message(payload)

    async def run(self, on_message: Callable[[Link, Message], None]) -> str:
        """Reads messages until the link ends, however it ends; returns the reason. Cancelling it ends the link."""
        self._ticked_s = self._heard_s = self._clock.monotonic()
        self._tick()
        try:
            while self.close_reason is None:
                message = await self.receive()
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
