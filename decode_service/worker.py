"""The decode role: receives KV or computes prompts itself, then generates. Joins the engine and the fabric.

Owns one `Attempt` per sequence of this worker, from its command to its last event; after `finished` or `failed` nothing more
is said of it. All methods run on the event loop. An attempt whose KV is being received is settled by the receiver *before*
the engine is told to free its blocks: that order is what makes reuse safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from common import log
from common.clock import Clock
from common.errors import (
    BatonError,
    ClientCancelled,
    DeadlineExceeded,
    Draining,
    HandoffFailed,
    Internal,
    InvalidRequest,
    WorkerUnavailable,
    error_from_kind,
)
from common.ids import AttemptKey
from common.metrics import WorkerMetrics
from common.rpc import convert
from common.rpc import serving_pb2 as pb
from common.types import FinishReason, HandoffTimeline, PrefillTimeline
from engine import commands
from engine.commands import Command, Event, SequenceSpec, StepEvents
from engine.serving.sequence_input import parse_attempt, parse_reserve, parse_sequence
from engine.serving.session import (
    RouterSession,
    attempt_key,
    attempt_message,
    failed_message,
    prompt_logprobs_message,
    tokens_message,
)
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.receiver import KVReceiver

LOG = log.get_logger("decode.worker")
LAST_REFUSALS_S = 1.0
"""How long a worker that stops waits for refusals that are still being dialled out."""


class Stage(Enum):
    """Where an attempt is. LOCAL: computes here. RESERVING → RECEIVING → GENERATING: the handed-over way. ENDING: abort asked for."""

    LOCAL = "local"
    RESERVING = "reserving"
    RECEIVING = "receiving"
    GENERATING = "generating"
    ENDING = "ending"


@dataclass(slots=True)
class Attempt:
    key: AttemptKey
    session: RouterSession
    spec: SequenceSpec
    stage: Stage
    received_s: float
    reserve: pb.Reserve | None = None
    has_receive_begun: bool = False
    reserved_s: float = 0.0
    handoff: HandoffTimeline | None = None
    receiving: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None
    failure: BatonError | None = None
    abort_reason: str = ""
    first_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What the worker checks commands against. `transfer_s` bounds one handoff when the request itself has no deadline."""

    vocab_size: int
    block_size: int
    max_sequence_tokens: int
    transfer_s: float


@dataclass(slots=True)
class DecodeWorker:
    """Commands of routers in, engine and fabric driven, events out."""

    submit: Callable[[Command], None]
    receiver: KVReceiver
    endpoint: KVEndpoint
    describe_worker: Callable[[], pb.WorkerDescription]
    on_fault: Callable[[BaseException], None]
    clock: Clock
    limits: DecodeLimits
    metrics: WorkerMetrics
    is_draining: bool = False
    _attempts: dict[AttemptKey, Attempt] = field(default_factory=dict)
    _refusals: set[asyncio.Task[bool]] = field(default_factory=set)

    # commands -----------------------------------------------------------------------------------------------------

    def on_command(self, session: RouterSession, command: pb.Command) -> None:
        match command.WhichOneof("command"):
            case "generate":
                self._take(session, command.generate.attempt, command.generate.sequence, None)
            case "reserve":
                self._take(session, command.reserve.attempt, command.reserve.sequence, command.reserve)
            case "abort":
                attempt = self._attempts.get(attempt_key(command.abort.attempt))
                if attempt is not None and attempt.session is session:
                    self._abort(attempt, command.abort.reason[:200])
            case other:
                self.metrics.protocol_error("command")
                LOG.event("command_not_for_decode", command=other, router=session.router_id)

    def _take(
        self, session: RouterSession, wire_attempt: pb.Attempt, sequence: pb.SequenceSpec, reserve: pb.Reserve | None
    ) -> None:
        now = self.clock.monotonic()
        key = attempt_key(wire_attempt)
        if (running := self._attempts.get(key)) is not None:
            self._refuse_double(running, session)
            return
        try:
            parse_attempt(wire_attempt)
            if reserve is not None:
                parse_reserve(reserve)
        except InvalidRequest as error:
            # Nobody can be told of the refusal either: what names the handoff is what is wrong.
            self._post_failed(session, wire_attempt, error)
            return
        try:
            if self.is_draining:
                raise Draining("this decode worker is draining")
            spec = parse_sequence(
                wire_attempt, sequence, vocab_size=self.limits.vocab_size, max_sequence_tokens=self.limits.max_sequence_tokens
            )
            stage = Stage.LOCAL if reserve is None else Stage.RESERVING
            attempt = Attempt(key, session, spec, stage, now, reserve)
            self.submit(commands.Generate(spec) if reserve is None else commands.Reserve(spec))
        except BatonError as error:
            self._post_failed(session, wire_attempt, error)
            if reserve is not None:
                self._refuse_at_prefill(reserve, error)
            return
        self._attempts[key] = attempt
        if sequence.deadline_s > 0:
            loop = asyncio.get_running_loop()
            attempt.deadline = loop.call_later(sequence.deadline_s, self._on_deadline, key, sequence.deadline_s)

    def _refuse_double(self, running: Attempt, session: RouterSession) -> None:
        """The running attempt goes on, and so does its handoff: a refusal there would end it. Its own router hears nothing,
        because a `failed` would be taken for the attempt's end."""
        self.metrics.protocol_error("attempt")
        LOG.warn("attempt_doubled", attempt=str(running.key), router=session.router_id)
        if running.session is not session:
            error = InvalidRequest(f"attempt {running.key} is already running on this worker", param="attempt")
            session.post(pb.Event(attempt=attempt_message(running.key), failed=failed_message(error)))

    def _on_deadline(self, key: AttemptKey, deadline_s: float) -> None:
        attempt = self._attempts.get(key)
        if attempt is not None:
            attempt.failure = attempt.failure or DeadlineExceeded(f"the request's deadline of {deadline_s:.3f} s has passed")
            self._abort(attempt, "deadline")

    def on_session_closed(self, session: RouterSession) -> None:
        for attempt in [a for a in self._attempts.values() if a.session is session]:
            self._abort(attempt, "router gone")

    # ending -------------------------------------------------------------------------------------------------------

    def _abort(self, attempt: Attempt, reason: str) -> None:
        """Idempotent. While KV is being received the receiving task is cancelled, settles, and then frees the blocks."""
        if attempt.stage is Stage.ENDING:
            return
        was, attempt.stage, attempt.abort_reason = attempt.stage, Stage.ENDING, reason
        if was is Stage.RECEIVING and attempt.receiving is not None:
            attempt.receiving.cancel()
            return
        if was is Stage.RESERVING and attempt.reserve is not None:
            self._refuse_at_prefill(attempt.reserve, attempt.failure or ClientCancelled(reason))
        self._submit_abort(attempt.key, reason)

    def _submit_abort(self, key: AttemptKey, reason: str) -> None:
        """An abort must not be lost to a full queue: it is tried again until the engine has room."""
        try:
            self.submit(commands.Abort(key, reason))
        except WorkerUnavailable:
            pass  # the engine has stopped, and all its sequences with it
        except BatonError:
            asyncio.get_running_loop().call_later(0.05, self._submit_abort, key, reason)

    def _end(self, attempt: Attempt, event: pb.Event) -> None:
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        self._attempts.pop(attempt.key, None)
        attempt.session.post(event)

    def _end_failed(self, attempt: Attempt, error: BatonError) -> None:
        self.metrics.attempt_ended("failed", error.kind)
        self._end(attempt, pb.Event(attempt=attempt_message(attempt.key), failed=failed_message(error)))

    def _post_failed(self, session: RouterSession, attempt: pb.Attempt, error: BatonError) -> None:
        self.metrics.attempt_ended("failed", error.kind)
        session.post(pb.Event(attempt=attempt, failed=failed_message(error)))

    def _refuse_at_prefill(self, reserve: pb.Reserve, error: BatonError) -> None:
        """Tells prefill at once that nobody will fetch, so that nothing there waits for a lease."""
        refusal = self.receiver.refuse(
            address=reserve.prefill_kv_address,
            peer=f"{reserve.prefill_worker_id}@{reserve.prefill_incarnation}",
            handoff_id=reserve.handoff_id,
            epoch=reserve.attempt.epoch,
            reason=error.message,
            kind=error.kind,
        )
        task = asyncio.create_task(refusal, name=f"refuse:{reserve.handoff_id}")
        self._refusals.add(task)
        task.add_done_callback(self._refusal_done)

    def _refusal_done(self, task: asyncio.Task[bool]) -> None:
        self._refusals.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self.on_fault(error)
        elif not task.result():
            LOG.warn("refusal_not_delivered", task=task.get_name())

    # engine events ------------------------------------------------------------------------------------------------

    def on_step_events(self, step: StepEvents) -> None:
        for event in step.events:
            attempt = self._attempts.get(event.key)
            if attempt is not None:
                self._on_event(attempt, event, step.now)

    def _on_event(self, attempt: Attempt, event: Event, now: float) -> None:
        match event:
            case commands.Reserved():
                self._on_reserved(attempt, event, now)
            case commands.Refused():
                error = attempt.failure or error_from_kind(event.error_kind, event.message, event.retry_after_s or None)
                if attempt.reserve is not None and attempt.stage is not Stage.ENDING:
                    self._refuse_at_prefill(attempt.reserve, error)
                self._end_failed(attempt, error)
            case commands.Sampled():
                self._on_sampled(attempt, event, now)
            case commands.SequenceEnded():
                self._on_ended(attempt, event)
            case commands.PromptLogprobs():
                if attempt.stage is not Stage.ENDING:
                    rated = prompt_logprobs_message(event)
                    attempt.session.post(pb.Event(attempt=attempt_message(attempt.key), prompt_logprobs=rated))
            case commands.ChunkComputed():
                pass

    def _on_reserved(self, attempt: Attempt, event: commands.Reserved, now: float) -> None:
        if attempt.stage is not Stage.RESERVING or attempt.reserve is None:
            return
        attempt.stage = Stage.RECEIVING
        attempt.reserved_s = now
        reserved = pb.Reserved(num_cached_tokens=event.num_cached_tokens, num_blocks=len(event.block_ids))
        attempt.session.post(pb.Event(attempt=attempt_message(attempt.key), reserved=reserved))
        attempt.receiving = asyncio.create_task(self._receive(attempt, attempt.reserve, event), name=f"receive:{attempt.key}")
        attempt.receiving.add_done_callback(lambda task: self._on_receive_done(attempt, task))

    def _on_receive_done(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        """A cancelled receive has settled, or never began: a task that is cancelled before its first step runs nothing at all."""
        if task.cancelled():
            if not attempt.has_receive_begun and attempt.reserve is not None:
                self._refuse_at_prefill(attempt.reserve, attempt.failure or ClientCancelled(attempt.abort_reason or "cancelled"))
            self._submit_abort(attempt.key, attempt.abort_reason or "cancelled")
        elif (error := task.exception()) is not None:
            self.on_fault(error)

    async def _receive(self, attempt: Attempt, reserve: pb.Reserve, reserved: commands.Reserved) -> None:
        """Runs one handoff to its end. Whatever way it ends, nothing touches the blocks when the engine hears of it."""
        key = attempt.key
        attempt.has_receive_begun = True
        try:
            received = await self.receiver.receive(
                handoff_id=reserve.handoff_id,
                epoch=key.epoch,
                peer=f"{reserve.prefill_worker_id}@{reserve.prefill_incarnation}",
                address=reserve.prefill_kv_address,
                num_prompt_tokens=len(attempt.spec.token_ids),
                first_block_index=reserved.num_cached_tokens // self.limits.block_size,
                block_ids=reserved.block_ids,
                deadline_s=self.limits.transfer_s,
            )
            self.submit(commands.Commit(key, received.first_token_id))
        except Internal as error:
            # A scatter that outlasted its quarantine may still write: these blocks are never freed, the process is replaced.
            self._end_failed(attempt, error)
            return
        except BatonError as error:
            attempt.failure = attempt.failure or error
            attempt.stage = Stage.ENDING
            self._submit_abort(key, error.kind)
            return
        attempt.stage = Stage.GENERATING
        attempt.handoff = replace(
            received.timeline,
            reserved_s=attempt.reserved_s,
            num_cached_tokens=reserved.num_cached_tokens,
            committed_s=self.clock.monotonic(),
        )

    def _on_sampled(self, attempt: Attempt, event: commands.Sampled, now: float) -> None:
        if attempt.stage is Stage.ENDING:
            return
        if attempt.first_token_s == 0.0:
            attempt.first_token_s = now
        message = attempt_message(attempt.key)
        attempt.session.post(pb.Event(attempt=message, tokens=tokens_message(event)))
        if attempt.handoff is not None and attempt.handoff.first_decode_s == 0.0:
            attempt.handoff = replace(attempt.handoff, first_decode_s=now)
            self.metrics.handoff_received(attempt.handoff)
            attempt.session.post(pb.Event(attempt=message, handed_over=convert.handoff_timeline_to_pb(attempt.handoff)))

    def _on_ended(self, attempt: Attempt, event: commands.SequenceEnded) -> None:
        if attempt.failure is not None:
            self._end_failed(attempt, attempt.failure)
            return
        if event.reason is FinishReason.ABORT and attempt.stage is not Stage.ENDING:
            self._end_failed(attempt, HandoffFailed(f"attempt {attempt.key} was dropped by the engine"))
            return
        message = attempt_message(attempt.key)
        # A sequence may come to its own end in the step that an abort waits behind: its last tokens were not sent then.
        reason = FinishReason.ABORT if attempt.stage is Stage.ENDING else event.reason
        finished = pb.Finished(reason=reason.value, num_tokens=event.num_tokens)
        if attempt.reserve is None:
            timeline = PrefillTimeline(
                received_s=attempt.received_s,
                scheduled_s=event.scheduled_s,
                computed_s=attempt.first_token_s,
                first_token_s=attempt.first_token_s,
                num_cached_tokens=event.num_cached_tokens,
                num_chunks=event.num_chunks,
            )
            attempt.session.post(pb.Event(attempt=message, prefilled=convert.prefill_timeline_to_pb(timeline)))
        self.metrics.attempt_ended(reason.value, "")
        self._end(attempt, pb.Event(attempt=message, finished=finished))

    # life cycle ---------------------------------------------------------------------------------------------------

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    @property
    def num_handoffs(self) -> int:
        return sum(attempt.receiving is not None and not attempt.receiving.done() for attempt in self._attempts.values())

    def drain(self) -> int:
        self.is_draining = True
        return self.num_attempts

    def abort_all(self, error: BatonError) -> None:
        """The drain's grace is over: what still runs ends with this error."""
        for attempt in list(self._attempts.values()):
            attempt.failure = attempt.failure or error
            self._abort(attempt, error.kind)

    async def close(self) -> None:
        """Settles every handoff, lets the last refusals out (prefill would wait for a lease instead), closes the links."""
        receiving = [a.receiving for a in self._attempts.values() if a.receiving is not None and not a.receiving.done()]
        for task in receiving:
            task.cancel()
        await asyncio.gather(*receiving, return_exceptions=True)
        if self._refusals:
            await asyncio.wait(self._refusals, timeout=LAST_REFUSALS_S)
        for refusal in list(self._refusals):
            refusal.cancel()
        await asyncio.gather(*self._refusals, return_exceptions=True)
        await self.receiver.close()
        await self.endpoint.close()

    @property
    def kv_address(self) -> str:
        """Decode dials; nobody dials it."""
        return ""

    @property
    def kv_fingerprint(self) -> str:
        return self.endpoint.layout.fingerprint()

    @property
    def unhealthy_reason(self) -> str | None:
        return self.receiver.unhealthy or self.endpoint.unhealthy_reason

    def describe(self) -> pb.WorkerDescription:
        return self.describe_worker()
