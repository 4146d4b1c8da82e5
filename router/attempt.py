"""One attempt at a request: both legs dispatched at once, their events in one bounded inbox, every leg ended exactly once.

Knows which leg does what and nothing of text or retries. `end` is synchronous and idempotent, so any exit of a request (done, failed,
cancelled, deadline, shutdown) runs the same line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from common.errors import BatonError, Internal, WorkerUnavailable
from common.ids import AttemptKey, new_handoff_id
from common.rpc import serving_pb2 as pb
from router import wire
from router.clients import LegSink, WorkerClient, WorkerPool
from router.events import Failed, Finished, LegEvent, LegRole, Tokens
from router.placement import Mode, Placement, WorkerKey, worker_key
from router.retry import AttemptFailed

INBOX_EVENTS_MAX = 4096
"""The orchestration of a request never waits for its client, so a full inbox means a stuck event loop, not a slow client."""


@dataclass(slots=True)
class _OpenLeg:
    client: WorkerClient
    role: LegRole


class Attempt:
    """Dispatch with `start`, take events with `next`, and always call `end`."""

    def __init__(self, key: AttemptKey, placement: Placement, pool: WorkerPool) -> None:
        self.key = key
        self.placement = placement
        self.has_first_token = False
        self._pool = pool
        self._legs: dict[LegRole, _OpenLeg] = {}
        self._events: deque[tuple[LegRole, WorkerKey, LegEvent]] = deque()
        self._overflowed = False
        self._wake = asyncio.Event()

    def start(self, spec: pb.SequenceSpec, num_known_tokens: int) -> None:
        """Sends the commands of all legs without waiting for anything. Raises AttemptFailed when a worker cannot be reached."""
        placement = self.placement
        handoff_id = new_handoff_id()
        if placement.mode is Mode.LOCAL:
            assert placement.decode is not None
            self._dispatch(LegRole.LOCAL, worker_key(placement.decode), wire.generate(self.key, spec), num_known_tokens)
            return
        assert placement.prefill is not None
        if placement.decode is not None:
            command = wire.reserve(self.key, spec, handoff_id, placement.prefill)
            self._dispatch(LegRole.DECODE, worker_key(placement.decode), command, 0)
        self._dispatch(LegRole.PREFILL, worker_key(placement.prefill), wire.prefill(self.key, spec, handoff_id), num_known_tokens)

    async def next(self) -> tuple[LegRole, LegEvent]:
        """The next event of any leg, in each leg's order. A failure that dooms the attempt is raised as AttemptFailed.

        A prefill leg that fails after its token arrived dooms nothing by itself: the decode worker may have everything.
        """
        while True:
            while not self._events:
                self._wake.clear()
                await self._wake.wait()
            if self._overflowed:
                raise Internal(f"more than {INBOX_EVENTS_MAX} events of attempt {self.key} wait")
            role, worker, event = self._events.popleft()
            if isinstance(event, Finished | Failed):
                self._legs.pop(role, None)
            if isinstance(event, Tokens) and role is not LegRole.DECODE:
                self.has_first_token = True
            error = _error_of(event)
            if error is None:
                return role, event
            if role is not LegRole.PREFILL or not self.has_first_token or self.placement.mode is Mode.PREFILL_ONLY:
                raise AttemptFailed(error, role, worker)

    def end(self, reason: str) -> None:
        """Aborts every leg that has not ended by itself."""
        legs, self._legs = self._legs, {}
        for leg in legs.values():
            leg.client.abort(self.key, reason)

    def leave(self, role: LegRole) -> None:
        """Lets a leg end by itself: the handoff is done and only its last word is missing."""
        leg = self._legs.pop(role, None)
        if leg is not None:
            leg.client.detach(self.key)

    def _dispatch(self, role: LegRole, worker: WorkerKey, command: pb.Command, num_queued_tokens: int) -> None:
        client = self._pool.get(worker)
        if client is None:
            raise AttemptFailed(WorkerUnavailable(f"worker {worker[0]} left the fleet"), role, worker)
        try:
            client.dispatch(self.key, command, self._sink(role, worker), num_queued_tokens)
        except BatonError as error:
            raise AttemptFailed(error, role, worker) from error
        self._legs[role] = _OpenLeg(client, role)

    def _sink(self, role: LegRole, worker: WorkerKey) -> LegSink:
        def put(event: LegEvent) -> None:
            if len(self._events) >= INBOX_EVENTS_MAX:
                self._overflowed = True
            else:
                self._events.append((role, worker, event))
            self._wake.set()

        return put


def _error_of(event: LegEvent) -> BatonError | None:
    """A failure, or an abort that nobody here asked for."""
    if isinstance(event, Failed):
        return event.error
    if isinstance(event, Finished) and event.reason not in ("stop", "length", "handed_over"):
        return WorkerUnavailable(f"the worker gave the sequence up (reason {event.reason!r})")
    return None
