"""The two ends of a handoff as pure transition tables: (state, event) → handler, and one function for each end.

It must not know sockets, slabs, threads or time: an event goes in, the next record and instructions for the shell come out.
Messages of the wire are events as they are; indexes count frames and blocks of one handoff. An event that the table does not
know is a fault: it is counted and changes nothing, and so is every message of another epoch.

Sender:    OPEN → ANNOUNCING → AWAITING_ACK → DONE, or CLOSING → DONE
Receiver:  RESERVED → RECEIVING → COMMITTED, or SETTLING → RELEASED
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Generic, TypeVar

from kvtransfer.messages import FRAMES_MAX, Abort, Ack, Announce, Closing, Committed, Open, Refuse, Settled, short_reason

# ---- what both ends share ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a handoff ended early. `kind` is of the error table."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class LocalAbort:
    """This worker gives the handoff up (the client left, the deadline passed, the worker drains)."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseLapsed:
    """Nothing was heard of the handoff for its lease; in CLOSING: the peer did not settle within the quarantine."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    reason: str


@dataclass(frozen=True, slots=True)
class Send:
    message: Open | Announce | Closing | Ack | Committed | Abort | Settled


@dataclass(frozen=True, slots=True)
class Forget:
    """The record is terminal and no memory is tied to it any more."""


class Fault(Enum):
    STALE_EPOCH = "stale_epoch"
    PROTOCOL_ERROR = "protocol_error"


Record = TypeVar("Record", "SenderHandoff", "ReceiverHandoff")


@dataclass(frozen=True, slots=True)
class Step(Generic[Record]):
    """The record after the event. With a fault the record is the one before and there are no instructions."""

    record: Record
    instructions: tuple[Any, ...] = ()
    fault: Fault | None = None
    explanation: str = ""


_WIRE = (Open, Announce, Closing, Ack, Committed, Refuse, Abort, Settled)


def _advance(table: Mapping[tuple[Enum, type[Any]], Callable[[Any, Any], Step[Any]]], record: Any, event: Any) -> Step[Any]:
    if isinstance(event, _WIRE):
        if event.handoff_id != record.handoff_id:
            raise AssertionError(f"event of handoff {event.handoff_id} given to {record.handoff_id}")
        if event.epoch < record.epoch:
            return Step(record, fault=Fault.STALE_EPOCH, explanation=f"epoch {event.epoch}, the handoff is at {record.epoch}")
        if event.epoch > record.epoch:
            return _protocol_error(record, f"epoch {event.epoch} is ahead of {record.epoch}")
    handler = table.get((record.state, type(event)))
    if handler is None:
        return _protocol_error(record, f"{type(event).__name__} in {record.state.value}")
    return handler(record, event)


def _protocol_error(record: Any, explanation: str) -> Step[Any]:
    return Step(record, fault=Fault.PROTOCOL_ERROR, explanation=explanation)


def _unchanged(record: Any, event: Any) -> Step[Any]:
    """A crossing that is part of the protocol: nothing to do, nothing to count."""
    return Step(record)


# ---- the sending end -----------------------------------------------------------------------------------------------


class SenderState(Enum):
    OPEN = "open"
    ANNOUNCING = "announcing"
    AWAITING_ACK = "awaiting_ack"
    CLOSING = "closing"
    DONE = "done"


class Ended(Enum):
    """How an offer ended; only ACKNOWLEDGED means that the receiver has all blocks."""

    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class BlocksFinal:
    """KV of the first `num_blocks` blocks of the sequence will not change any more."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class CloseRequested:
    first_token_id: int
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SlabGranted:
    """A slab for the next frame, of at most `num_blocks_max` blocks."""

    num_blocks_max: int


@dataclass(frozen=True, slots=True)
class Gathered:
    frame: Announce


@dataclass(frozen=True, slots=True)
class GatherFailed:
    frame_index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Gather:
    """Copy these blocks into the granted slab, which now belongs to the frame."""

    frame_index: int
    first_block_index: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ReturnSlab:
    frame_index: int


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """No gather reads the blocks any more; emitted exactly once for each handoff."""

    ended: Ended
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class AwaitSettled:
    """The receiver may still read announced slabs: keep them until it says Settled, but not longer than the quarantine."""


@dataclass(frozen=True, slots=True)
class SenderHandoff:
    """Blocks [first_block_index, next_block_index) are in frames, [next_block_index, num_final_blocks) wait for a slab.

    `gathering` and `unacked` hold frame indexes that own a slab.
    """

    handoff_id: str
    epoch: int
    num_prompt_tokens: int
    num_blocks: int
    state: SenderState = SenderState.OPEN
    first_block_index: int = 0
    next_block_index: int = 0
    num_final_blocks: int = 0
    num_frames: int = 0
    gathering: frozenset[int] = frozenset()
    unacked: frozenset[int] = frozenset()
    closing: CloseRequested | None = None
    ended: Ended | None = None
    failure: Failure | None = None
    released: bool = False

    @property
    def num_ready_blocks(self) -> int:
        """Blocks that could be gathered now."""
        return max(0, self.num_final_blocks - self.next_block_index) if self.state is SenderState.ANNOUNCING else 0


SenderStep = Step[SenderHandoff]


def step_sender(handoff: SenderHandoff, event: Any) -> SenderStep:
    """The sending end's reaction to one event. Pure; never raises for anything a peer can cause."""
    return _advance(SENDER_TABLE, handoff, event)


def _opened(h: SenderHandoff, e: Open) -> SenderStep:
    if e.num_prompt_tokens != h.num_prompt_tokens or e.first_block_index > h.num_blocks:
        reason = (
            f"the receiver opened {e.num_prompt_tokens} tokens from block {e.first_block_index}, "
            f"the sender has {h.num_prompt_tokens} tokens in {h.num_blocks} blocks"
        )
        return _end_sending(h, Ended.FAILED, Failure("HandoffFailed", reason), tell_peer=True)
    opened = replace(h, state=SenderState.ANNOUNCING, first_block_index=e.first_block_index, next_block_index=e.first_block_index)
    return _close_if_complete(opened, ())


def _blocks_final(h: SenderHandoff, e: BlocksFinal) -> SenderStep:
    if not h.num_final_blocks <= e.num_blocks <= h.num_blocks:
        raise AssertionError(f"{h.handoff_id}: {e.num_blocks} final blocks after {h.num_final_blocks}, of {h.num_blocks}")
    return Step(replace(h, num_final_blocks=e.num_blocks))


def _close_requested(h: SenderHandoff, e: CloseRequested) -> SenderStep:
    if h.closing is not None or h.num_final_blocks != h.num_blocks:
        raise AssertionError(f"{h.handoff_id}: closed with {h.num_final_blocks} of {h.num_blocks} blocks final, or twice")
    return _close_if_complete(replace(h, closing=e), ())


def _close_if_complete(h: SenderHandoff, instructions: tuple[Any, ...]) -> SenderStep:
    """The closing announcement follows the last frame, so its frame count is final."""
    if h.state is not SenderState.ANNOUNCING or h.closing is None or h.gathering or h.next_block_index != h.num_blocks:
        return Step(h, instructions)
    closing = Closing(h.handoff_id, h.epoch, h.num_frames, h.closing.first_token_id, h.closing.extra)
    return Step(replace(h, state=SenderState.AWAITING_ACK), (*instructions, Send(closing)))


def _slab_granted(h: SenderHandoff, e: SlabGranted) -> SenderStep:
    num_blocks = min(h.num_ready_blocks, e.num_blocks_max)
    if num_blocks < 1 or h.num_frames >= FRAMES_MAX:
        raise AssertionError(f"{h.handoff_id}: a slab granted with {h.num_ready_blocks} blocks ready, frame {h.num_frames}")
    gather = Gather(h.num_frames, h.next_block_index, num_blocks)
    return Step(
        replace(
            h,
            next_block_index=h.next_block_index + num_blocks,
            num_frames=h.num_frames + 1,
            gathering=h.gathering | {gather.frame_index},
        ),
        (gather,),
    )


def _gathered(h: SenderHandoff, e: Gathered) -> SenderStep:
    index = e.frame.frame_index
    announced = replace(h, gathering=h.gathering - {index}, unacked=h.unacked | {index})
    return _close_if_complete(announced, (Send(e.frame),))


def _gather_failed(h: SenderHandoff, e: GatherFailed) -> SenderStep:
    h = replace(h, gathering=h.gathering - {e.frame_index})
    ended = _end_sending(h, Ended.FAILED, Failure("HandoffFailed", f"gather failed: {e.reason}"), tell_peer=True)
    return replace(ended, instructions=(ReturnSlab(e.frame_index), *ended.instructions))


def _acked(h: SenderHandoff, e: Ack) -> SenderStep:
    if e.frame_index not in h.unacked:
        return _protocol_error(h, f"Ack of frame {e.frame_index}, which is not announced or already acknowledged")
    return Step(replace(h, unacked=h.unacked - {e.frame_index}), (ReturnSlab(e.frame_index),))


def _committed(h: SenderHandoff, e: Committed) -> SenderStep:
    done = replace(h, state=SenderState.DONE, unacked=frozenset(), ended=Ended.ACKNOWLEDGED, released=True)
    return Step(done, (*_return_slabs(h.unacked), ReleaseBlocks(Ended.ACKNOWLEDGED, None), Forget()))


def _refused(h: SenderHandoff, e: Refuse) -> SenderStep:
    return _end_sending(h, Ended.REFUSED, Failure(e.kind, e.reason), tell_peer=False)


def _peer_aborted_sending(h: SenderHandoff, e: Abort) -> SenderStep:
    return _end_sending(h, Ended.ABORTED, Failure(e.kind, f"the receiver aborted: {e.reason}"), tell_peer=False)


def _local_abort_sending(h: SenderHandoff, e: LocalAbort) -> SenderStep:
    return _end_sending(h, Ended.ABORTED, Failure(e.kind, e.reason), tell_peer=h.state is not SenderState.OPEN)


def _expired_sending(h: SenderHandoff, e: LeaseLapsed) -> SenderStep:
    if h.state is SenderState.OPEN:
        return _end_sending(h, Ended.EXPIRED, Failure("LeaseExpired", "the receiver never opened the handoff"), tell_peer=False)
    return _end_sending(h, Ended.EXPIRED, Failure("LeaseExpired", "nothing heard of the receiver for the lease"), tell_peer=True)


def _link_lost_sending(h: SenderHandoff, e: LinkLost) -> SenderStep:
    ended = _end_sending(h, Ended.FAILED, Failure("HandoffFailed", f"link lost: {e.reason}"), tell_peer=False)
    return _merge(ended, _peer_is_out(ended.record, e)) if ended.record.state is SenderState.CLOSING else ended


def _end_sending(h: SenderHandoff, ended: Ended, failure: Failure, *, tell_peer: bool) -> SenderStep:
    """To CLOSING, and on to DONE at once when nothing is tied to the handoff."""
    told: tuple[Any, ...] = (Send(Abort(h.handoff_id, h.epoch, failure.kind, short_reason(failure.reason))),) if tell_peer else ()
    closing = replace(h, state=SenderState.CLOSING, ended=ended, failure=failure)
    step = _merge(Step(closing, told), _finish_sending(closing))
    return step if step.record.state is SenderState.DONE else replace(step, instructions=(*step.instructions, AwaitSettled()))


def _finish_sending(h: SenderHandoff) -> SenderStep:
    """In CLOSING: blocks are released when no gather runs; the record goes when no slab is out either."""
    instructions: list[Any] = []
    if not h.gathering and not h.released:
        assert h.ended is not None, "only an ended handoff closes"
        instructions.append(ReleaseBlocks(h.ended, h.failure))
        h = replace(h, released=True)
    if not h.gathering and not h.unacked:
        instructions.append(Forget())
        h = replace(h, state=SenderState.DONE)
    return Step(h, tuple(instructions))


def _gather_ended_closing(h: SenderHandoff, e: Gathered | GatherFailed) -> SenderStep:
    index = e.frame.frame_index if isinstance(e, Gathered) else e.frame_index
    h = replace(h, gathering=h.gathering - {index})
    return _merge(Step(h, (ReturnSlab(index),)), _finish_sending(h))


def _acked_closing(h: SenderHandoff, e: Ack) -> SenderStep:
    step = _acked(h, e)
    return step if step.fault else _merge(step, _finish_sending(step.record))


def _peer_is_out(h: SenderHandoff, e: Settled | Committed | LinkLost | LeaseLapsed) -> SenderStep:
    """The receiver reads nothing more, or has had its time: the announced slabs come home."""
    out = replace(h, unacked=frozenset())
    return _merge(Step(out, _return_slabs(h.unacked)), _finish_sending(out))


def _return_slabs(frames: frozenset[int]) -> tuple[ReturnSlab, ...]:
    return tuple(ReturnSlab(index) for index in sorted(frames))


def _merge(first: SenderStep, second: SenderStep) -> SenderStep:
    return Step(second.record, (*first.instructions, *second.instructions))


_S = SenderState
SENDER_TABLE: dict[tuple[Enum, type[Any]], Callable[[Any, Any], SenderStep]] = {
    (_S.OPEN, Open): _opened,
    (_S.OPEN, BlocksFinal): _blocks_final,
    (_S.OPEN, CloseRequested): _close_requested,
    (_S.OPEN, Refuse): _refused,
    (_S.OPEN, Abort): _peer_aborted_sending,
    (_S.OPEN, LocalAbort): _local_abort_sending,
    (_S.OPEN, LeaseLapsed): _expired_sending,
    (_S.ANNOUNCING, BlocksFinal): _blocks_final,
    (_S.ANNOUNCING, CloseRequested): _close_requested,
    (_S.ANNOUNCING, SlabGranted): _slab_granted,
    (_S.ANNOUNCING, Gathered): _gathered,
    (_S.ANNOUNCING, GatherFailed): _gather_failed,
    (_S.ANNOUNCING, Ack): _acked,
    (_S.ANNOUNCING, Refuse): _refused,
    (_S.ANNOUNCING, Abort): _peer_aborted_sending,
    (_S.ANNOUNCING, LocalAbort): _local_abort_sending,
    (_S.ANNOUNCING, LeaseLapsed): _expired_sending,
    (_S.ANNOUNCING, LinkLost): _link_lost_sending,
    (_S.AWAITING_ACK, Ack): _acked,
    (_S.AWAITING_ACK, Committed): _committed,
    (_S.AWAITING_ACK, Abort): _peer_aborted_sending,
    (_S.AWAITING_ACK, LocalAbort): _local_abort_sending,
    (_S.AWAITING_ACK, LeaseLapsed): _expired_sending,
    (_S.AWAITING_ACK, LinkLost): _link_lost_sending,
    # CLOSING: the engine and the peer may not know yet, so their events cross ours.
    (_S.CLOSING, BlocksFinal): _unchanged,
    (_S.CLOSING, CloseRequested): _unchanged,
    (_S.CLOSING, LocalAbort): _unchanged,
    (_S.CLOSING, Abort): _unchanged,
    (_S.CLOSING, Gathered): _gather_ended_closing,
    (_S.CLOSING, GatherFailed): _gather_ended_closing,
    (_S.CLOSING, Ack): _acked_closing,
    (_S.CLOSING, Settled): _peer_is_out,
    (_S.CLOSING, Committed): _peer_is_out,
    (_S.CLOSING, LinkLost): _peer_is_out,
    (_S.CLOSING, LeaseLapsed): _peer_is_out,
}


# ---- the receiving end ---------------------------------------------------------------------------------------------


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
    return _advance(RECEIVER_TABLE, handoff, event)


def _announced(h: ReceiverHandoff, e: Announce) -> ReceiverStep:
    end = e.first_block_index + e.num_blocks
    if h.frames.get(e.frame_index) == (e.first_block_index, e.num_blocks):
        return _protocol_error(h, f"frame {e.frame_index} announced twice")
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
        return _protocol_error(h, "closed twice")
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
RECEIVER_TABLE: dict[tuple[Enum, type[Any]], Callable[[Any, Any], ReceiverStep]] = {
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
    (_R.COMMITTED, Abort): _unchanged,
    (_R.COMMITTED, LocalAbort): _unchanged,
    (_R.COMMITTED, LinkLost): _unchanged,
    (_R.COMMITTED, ReadSettled): _unchanged,
    # SETTLING and RELEASED: late announcements are dropped, running frames end one by one.
    (_R.SETTLING, Announce): _unchanged,
    (_R.SETTLING, Closing): _unchanged,
    (_R.SETTLING, Abort): _unchanged,
    (_R.SETTLING, LocalAbort): _unchanged,
    (_R.SETTLING, LeaseLapsed): _unchanged,
    (_R.SETTLING, LinkLost): _unchanged,
    (_R.SETTLING, FrameStored): _frame_ended_settling,
    (_R.SETTLING, FrameFailed): _frame_ended_settling,
    (_R.SETTLING, FrameDropped): _frame_ended_settling,
    (_R.SETTLING, ReadSettled): _read_settled,
    (_R.RELEASED, Announce): _unchanged,
    (_R.RELEASED, Closing): _unchanged,
    (_R.RELEASED, Abort): _unchanged,
    (_R.RELEASED, LocalAbort): _unchanged,
    (_R.RELEASED, LeaseLapsed): _unchanged,
    (_R.RELEASED, LinkLost): _unchanged,
    (_R.RELEASED, ReadSettled): _read_settled,
}
