"""The receiving end of a handoff as a pure transition table: what its shell does after each event.

It must not know sockets, slabs, threads or time; `handoff` says what events, instructions and faults are. Indexes count the
frames and blocks of one handoff. States: RESERVED → RECEIVING → COMMITTED, or from either SETTLING → RELEASED.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from kvtransfer.handoff import (
    Failure,
    Forget,
    LeaseLapsed,
    LinkLost,
    LocalAbort,
    Send,
    Step,
    Table,
    advance,
    protocol_error,
    unchanged,
)
from kvtransfer.messages import Abort, Ack, Announce, Closing, Committed, Settled, short_reason


class ReceiverState(Enum):
    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    SETTLING = "settling"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class FetchStarted:
    frame_index: int


@dataclass(frozen=True, slots=True)
class FrameStored:
    """The frame's bytes are in its blocks and verified; its read has settled or needs no watching any more."""

    frame_index: int


@dataclass(frozen=True, slots=True)
class FrameFailed:
    """A read or scatter that failed, could not start, or did not verify; it touches no block any more."""

    frame_index: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class FrameDropped:
    """The frame was given up because the handoff ended; it touches no block any more."""

    frame_index: int


@dataclass(frozen=True, slots=True)
class ReadSettled:
    """The data plane does not use the frame's slabs any more, at either end."""

    frame_index: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """The frame may be read now, in any order."""

    frame: Announce


@dataclass(frozen=True, slots=True)
class Commit:
    closing: Closing


@dataclass(frozen=True, slots=True)
class ReleaseReservation:
    """Nothing touches the reserved blocks any more and nothing will; emitted once, only if nothing was committed."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class ReceiverHandoff:
    """`frames` are all announced ones (index → first block, number of blocks), `moving` those that may touch blocks,
    `reading` those whose read has not settled, `stored` those that are in their blocks and verified."""

    handoff_id: str
    epoch: int
    first_block_index: int
    num_blocks: int
    block_bytes: int
    frame_bytes_max: int
    region_bytes: int
    state: ReceiverState = ReceiverState.RESERVED
    frames: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    moving: frozenset[int] = frozenset()
    reading: frozenset[int] = frozenset()
    stored: frozenset[int] = frozenset()
    num_stored_blocks: int = 0
    closing: Closing | None = None
    failure: Failure | None = None


ReceiverStep = Step[ReceiverHandoff]


def step_receiver(handoff: ReceiverHandoff, event: Any) -> ReceiverStep:
    """The receiving end's reaction to one event. Pure; never raises for anything a peer can cause."""
    return advance(RECEIVER_TABLE, handoff, event)


def _announced(h: ReceiverHandoff, e: Announce) -> ReceiverStep:
    end = e.first_block_index + e.num_blocks
    if h.frames.get(e.frame_index) == (e.first_block_index, e.num_blocks):
        return protocol_error(h, f"frame {e.frame_index} announced twice")
    wrong = None
    if e.frame_index in h.frames:
        wrong = "its index was announced with other blocks"
    elif e.first_block_index < h.first_block_index or end > h.num_blocks:
        wrong = f"blocks [{h.first_block_index}, {h.num_blocks}) are wanted"
    elif e.num_bytes != e.num_blocks * h.block_bytes or e.num_bytes > h.frame_bytes_max:
        wrong = f"it has {e.num_bytes} bytes, a block has {h.block_bytes} and a frame at most {h.frame_bytes_max}"
    elif e.offset + e.num_bytes > h.region_bytes:
        wrong = f"bytes [{e.offset}, +{e.num_bytes}) lie outside the sender's {h.region_bytes}"
    elif any(first < end and e.first_block_index < first + count for first, count in h.frames.values()):
        wrong = "it overlaps another frame"
    if wrong is not None:
        reason = f"frame {e.frame_index} of blocks [{e.first_block_index}, {end}) cannot be: {wrong}"
        return _end_receiving(h, Failure("HandoffFailed", reason), tell_peer=True)
    frames = {**h.frames, e.frame_index: (e.first_block_index, e.num_blocks)}
    return Step(replace(h, state=ReceiverState.RECEIVING, frames=frames), (Fetch(e),))


def _closed(h: ReceiverHandoff, e: Closing) -> ReceiverStep:
    if h.closing is not None:
        return protocol_error(h, "closed twice")
    return _commit_if_complete(replace(h, state=ReceiverState.RECEIVING, closing=e), ())


def _fetch_started(h: ReceiverHandoff, e: FetchStarted) -> ReceiverStep:
    if e.frame_index not in h.frames or e.frame_index in h.moving | h.reading | h.stored:
        raise AssertionError(f"{h.handoff_id}: frame {e.frame_index} cannot be fetched twice or unannounced")
    return Step(replace(h, moving=h.moving | {e.frame_index}, reading=h.reading | {e.frame_index}))


def _frame_stored(h: ReceiverHandoff, e: FrameStored) -> ReceiverStep:
    index = e.frame_index
    if index not in h.moving:
        raise AssertionError(f"{h.handoff_id}: frame {index} stored but not moving")
    h = replace(
        h,
        moving=h.moving - {index},
        reading=h.reading - {index},
        stored=h.stored | {index},
        num_stored_blocks=h.num_stored_blocks + h.frames[index][1],
    )
    return _commit_if_complete(h, (Send(Ack(h.handoff_id, h.epoch, index)),))


def _commit_if_complete(h: ReceiverHandoff, instructions: tuple[Any, ...]) -> ReceiverStep:
    """All blocks stored and verified, and as many frames as the sender says: nothing else commits."""
    if h.closing is None:
        return Step(h, instructions)
    complete = h.num_stored_blocks == h.num_blocks - h.first_block_index
    if complete != (len(h.stored) == h.closing.num_frames) or len(h.frames) > h.closing.num_frames:
        reason = (
            f"the sender closed with {h.closing.num_frames} frames; {len(h.frames)} were announced, {len(h.stored)} are stored "
            f"and hold {h.num_stored_blocks} of {h.num_blocks - h.first_block_index} blocks"
        )
        ended = _end_receiving(h, Failure("HandoffFailed", reason), tell_peer=True)
        return Step(ended.record, (*instructions, *ended.instructions))
    if not complete:
        return Step(h, instructions)
    committed = Send(Committed(h.handoff_id, h.epoch))
    return Step(replace(h, state=ReceiverState.COMMITTED), (*instructions, committed, Commit(h.closing), Forget()))


def _frame_failed(h: ReceiverHandoff, e: FrameFailed) -> ReceiverStep:
    return _end_receiving(replace(h, moving=h.moving - {e.frame_index}), Failure(e.kind, e.reason), tell_peer=True)


def _peer_aborted_receiving(h: ReceiverHandoff, e: Abort) -> ReceiverStep:
    return _end_receiving(h, Failure(e.kind, f"the sender aborted: {e.reason}"), tell_peer=False)


def _local_abort_receiving(h: ReceiverHandoff, e: LocalAbort) -> ReceiverStep:
    return _end_receiving(h, Failure(e.kind, e.reason), tell_peer=True)


def _expired_receiving(h: ReceiverHandoff, e: LeaseLapsed) -> ReceiverStep:
    return _end_receiving(h, Failure("LeaseExpired", "nothing heard of the sender for the lease"), tell_peer=True)


def _link_lost_receiving(h: ReceiverHandoff, e: LinkLost) -> ReceiverStep:
    return _end_receiving(h, Failure("HandoffFailed", f"link lost: {e.reason}"), tell_peer=False)


def _end_receiving(h: ReceiverHandoff, failure: Failure, *, tell_peer: bool) -> ReceiverStep:
    told: tuple[Any, ...] = (Send(Abort(h.handoff_id, h.epoch, failure.kind, short_reason(failure.reason))),) if tell_peer else ()
    settling = replace(h, state=ReceiverState.SETTLING, failure=failure)
    step = _settle(settling)
    return Step(step.record, (*told, *step.instructions))


def _settle(h: ReceiverHandoff) -> ReceiverStep:
    """Blocks are free of us when nothing moves; the sender's slabs are when no read runs, which may be later."""
    failure = h.failure
    assert failure is not None, "only a failed handoff settles"
    instructions: list[Any] = []
    if h.state is ReceiverState.SETTLING and not h.moving:
        h = replace(h, state=ReceiverState.RELEASED)
        instructions.append(ReleaseReservation(failure))
    if h.state is ReceiverState.RELEASED and not h.reading:
        instructions += [Send(Settled(h.handoff_id, h.epoch)), Forget()]
    return Step(h, tuple(instructions))


def _frame_ended_settling(h: ReceiverHandoff, e: FrameStored | FrameFailed | FrameDropped) -> ReceiverStep:
    stored = isinstance(e, FrameStored)
    reading = h.reading - {e.frame_index} if stored else h.reading
    return _settle(replace(h, moving=h.moving - {e.frame_index}, reading=reading))


def _read_settled(h: ReceiverHandoff, e: ReadSettled) -> ReceiverStep:
    if e.frame_index not in h.reading:
        return Step(h)
    h = replace(h, reading=h.reading - {e.frame_index})
    return _settle(h) if h.failure is not None else Step(h)


_R = ReceiverState
RECEIVER_TABLE: Table[ReceiverHandoff] = {
    (_R.RESERVED, Announce): _announced,
    (_R.RESERVED, Closing): _closed,
    (_R.RESERVED, Abort): _peer_aborted_receiving,
    (_R.RESERVED, LocalAbort): _local_abort_receiving,
    (_R.RESERVED, LeaseLapsed): _expired_receiving,
    (_R.RESERVED, LinkLost): _link_lost_receiving,
    (_R.RECEIVING, Announce): _announced,
    (_R.RECEIVING, Closing): _closed,
    (_R.RECEIVING, FetchStarted): _fetch_started,
    (_R.RECEIVING, FrameStored): _frame_stored,
    (_R.RECEIVING, FrameFailed): _frame_failed,
    (_R.RECEIVING, ReadSettled): _read_settled,
    (_R.RECEIVING, Abort): _peer_aborted_receiving,
    (_R.RECEIVING, LocalAbort): _local_abort_receiving,
    (_R.RECEIVING, LeaseLapsed): _expired_receiving,
    (_R.RECEIVING, LinkLost): _link_lost_receiving,
    # After a commit the blocks belong to the sequence; what crosses our Committed has no effect on them.
    (_R.COMMITTED, Abort): unchanged,
    (_R.COMMITTED, LocalAbort): unchanged,
    (_R.COMMITTED, LinkLost): unchanged,
    (_R.COMMITTED, ReadSettled): unchanged,
    # SETTLING and RELEASED: late announcements are dropped, running frames end one by one.
    (_R.SETTLING, Announce): unchanged,
    (_R.SETTLING, Closing): unchanged,
    (_R.SETTLING, Abort): unchanged,
    (_R.SETTLING, LocalAbort): unchanged,
    (_R.SETTLING, LeaseLapsed): unchanged,
    (_R.SETTLING, LinkLost): unchanged,
    (_R.SETTLING, FrameStored): _frame_ended_settling,
    (_R.SETTLING, FrameFailed): _frame_ended_settling,
    (_R.SETTLING, FrameDropped): _frame_ended_settling,
    (_R.SETTLING, ReadSettled): _read_settled,
    (_R.RELEASED, Announce): unchanged,
    (_R.RELEASED, Closing): unchanged,
    (_R.RELEASED, Abort): unchanged,
    (_R.RELEASED, LocalAbort): unchanged,
    (_R.RELEASED, LeaseLapsed): unchanged,
    (_R.RELEASED, LinkLost): unchanged,
    (_R.RELEASED, ReadSettled): _read_settled,
}
