"""The sending end of a handoff as a pure transition table: what its shell does after each event.

It must not know sockets, slabs, threads or time; `handoff` says what events, instructions and faults are. Indexes count the
frames and blocks of one handoff. States: OPEN → ANNOUNCING → AWAITING_ACK → DONE, or from anywhere CLOSING → DONE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from kvtransfer.messages import FRAMES_MAX, Abort, Ack, Announce, Closing, Committed, Open, Refuse, Settled, short_reason


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
    return advance(SENDER_TABLE, handoff, event)


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
        return protocol_error(h, f"Ack of frame {e.frame_index}, which is not announced or already acknowledged")
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
SENDER_TABLE: Table[SenderHandoff] = {
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
    (_S.CLOSING, BlocksFinal): unchanged,
    (_S.CLOSING, CloseRequested): unchanged,
    (_S.CLOSING, LocalAbort): unchanged,
    (_S.CLOSING, Abort): unchanged,
    (_S.CLOSING, Gathered): _gather_ended_closing,
    (_S.CLOSING, GatherFailed): _gather_ended_closing,
    (_S.CLOSING, Ack): _acked_closing,
    (_S.CLOSING, Settled): _peer_is_out,
    (_S.CLOSING, Committed): _peer_is_out,
    (_S.CLOSING, LinkLost): _peer_is_out,
    (_S.CLOSING, LeaseLapsed): _peer_is_out,
}
