"""The prefill role: computes prompts, sends token 0 to the router and hands the KV to whoever opens the handoff.

Owns one `Attempt` per sequence of this worker. An attempt ends for its router with one `finished` or `failed`, and only once
its blocks are no longer needed by the fabric: the sender's `on_released` is called exactly once per offer, and that call is
what drops the engine's handoff Hold. All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from common import log
from common.clock import Clock
from common.errors import (
    BatonError,
    DeadlineExceeded,
    Draining,
    HandoffFailed,
    InvalidRequest,
    StaleEpoch,
    WorkerUnavailable,
    error_from_kind,
)
from common.ids import AttemptKey, HandoffId
from common.metrics import WorkerMetrics
from common.rpc import convert
from common.rpc import serving_pb2 as pb
from common.types import FinishReason, PrefillTimeline
from engine import commands
from engine.commands import Command, Event, SequenceSpec, StepEvents
from engine.serving.sequence_input import is_nameable, parse_attempt, parse_handoff_id, parse_sequence
from engine.serving.session import (
    RouterSession,
    attempt_key,
    attempt_message,
    failed_message,
    prompt_logprobs_message,
    tokens_message,
)
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.sender import HandoffOutcome, KVSender

LOG = log.get_logger("prefill.worker")


@dataclass(slots=True)
class Attempt:
    """`is_sequence_ended` and `is_released` are the two lifetimes: the engine's sequence and the fabric's use of its blocks."""

    key: AttemptKey
    session: RouterSession
    spec: SequenceSpec
    handoff_id: HandoffId
    received_s: float
    first_token_s: float = 0.0
    computed_s: float = 0.0
    first_token_id: int | None = None
    finish_reason: str = "handed_over"
    is_sequence_ended: bool = False
    is_released: bool = False
    is_aborted: bool = False
    failure: BatonError | None = None
    deadline: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    vocab_size: int
    max_sequence_tokens: int


@dataclass(slots=True)
class PrefillWorker:
    """Commands of routers in, engine and fabric driven, events out."""

    submit: Callable[[Command], None]
    sender: KVSender
    endpoint: KVEndpoint
    kv_address: str
    describe_worker: Callable[[], pb.WorkerDescription]
    clock: Clock
    limits: PrefillLimits
    metrics: WorkerMetrics
    is_draining: bool = False
    _attempts: dict[AttemptKey, Attempt] = field(default_factory=dict)

    # commands -----------------------------------------------------------------------------------------------------

    def on_command(self, session: RouterSession, command: pb.Command) -> None:
        match command.WhichOneof("command"):
            case "prefill":
                self._take(session, command.prefill)
            case "abort":
                attempt = self._attempts.get(attempt_key(command.abort.attempt))
                if attempt is not None and attempt.session is session:
                    self._abort(attempt, command.abort.reason[:200])
            case other:
                self.metrics.protocol_error("command")
                LOG.event("command_not_for_prefill", command=other, router=session.router_id)

    def _take(self, session: RouterSession, prefill: pb.Prefill) -> None:
        key = attempt_key(prefill.attempt)
        if (running := self._attempts.get(key)) is not None:
            self._refuse_double(running, session)
            return
        try:
            parse_attempt(prefill.attempt)
            if self.is_draining:
                raise Draining("this prefill worker is draining")
            handoff_id = HandoffId(parse_handoff_id(prefill.handoff_id))
            spec = parse_sequence(
                prefill.attempt,
                prefill.sequence,
                vocab_size=self.limits.vocab_size,
                max_sequence_tokens=self.limits.max_sequence_tokens,
            )
            attempt = Attempt(key, session, spec, handoff_id, self.clock.monotonic())
            self.sender.offer(handoff_id, key.epoch, len(spec.token_ids), lambda outcome: self._on_released(attempt, outcome))
            self.submit(commands.Prefill(spec))
        except BatonError as error:
            self._fail_early(session, prefill, error)
            return
        self._attempts[key] = attempt
        deadline_s = prefill.sequence.deadline_s
        if deadline_s > 0:
            attempt.deadline = asyncio.get_running_loop().call_later(deadline_s, self._on_deadline, attempt, deadline_s)

    def _fail_early(self, session: RouterSession, prefill: pb.Prefill, error: BatonError) -> None:
        """No attempt was begun. Decode has its leg already or gets it next: its open is answered at once, not by a lease."""
        self.metrics.attempt_ended("failed", error.kind)
        session.post(pb.Event(attempt=prefill.attempt, failed=failed_message(error)))
        # After StaleEpoch the handoff is somebody else's, who goes on.
        if not isinstance(error, StaleEpoch) and is_nameable(prefill.attempt, prefill.handoff_id):
            self.sender.abort(prefill.handoff_id, error.message, error.kind, prefill.attempt.epoch)

    def _refuse_double(self, running: Attempt, session: RouterSession) -> None:
        """The running attempt goes on. Its own router hears nothing: a `failed` would be taken for the attempt's end."""
        self.metrics.protocol_error("attempt")
        LOG.warn("attempt_doubled", attempt=str(running.key), router=session.router_id)
        if running.session is not session:
            error = InvalidRequest(f"attempt {running.key} is already running on this worker", param="attempt")
            session.post(pb.Event(attempt=attempt_message(running.key), failed=failed_message(error)))

    def _on_deadline(self, attempt: Attempt, deadline_s: float) -> None:
        attempt.failure = attempt.failure or DeadlineExceeded(f"the request's deadline of {deadline_s:.3f} s has passed")
        self._abort(attempt, "deadline")

    def on_session_closed(self, session: RouterSession) -> None:
        for attempt in [a for a in self._attempts.values() if a.session is session]:
            self._abort(attempt, "router gone")

    # ending -------------------------------------------------------------------------------------------------------

    def _abort(self, attempt: Attempt, reason: str) -> None:
        """Idempotent: stops the sequence and tells the peer; the attempt ends when both lifetimes have."""
        if attempt.is_aborted:
            return
        attempt.is_aborted = True
        if attempt.finish_reason == "handed_over":
            attempt.finish_reason = FinishReason.ABORT.value
        if not attempt.is_sequence_ended:
            self._submit_surely(commands.Abort(attempt.key, reason))
        if not attempt.is_released:
            self.sender.abort(attempt.handoff_id, reason, attempt.failure.kind if attempt.failure else "ClientCancelled")

    def _submit_surely(self, command: Command) -> None:
        """An abort or a release must not be lost to a full queue: it is tried again until the engine has room."""
        try:
            self.submit(command)
        except WorkerUnavailable:
            pass  # the engine has stopped, and all its sequences with it
        except BatonError:
            asyncio.get_running_loop().call_later(0.05, self._submit_surely, command)

    def _on_released(self, attempt: Attempt, outcome: HandoffOutcome) -> None:
        """The fabric needs the blocks no more, whatever the outcome was."""
        attempt.is_released = True
        if self._attempts.get(attempt.key) is not attempt:
            return  # The engine's queue was full: the offer was taken back, and the engine never heard of the sequence.
        if outcome.failure is not None and not attempt.is_aborted and attempt.finish_reason == "handed_over":
            attempt.failure = attempt.failure or error_from_kind(outcome.failure.kind, outcome.failure.reason)
            self._abort(attempt, outcome.failure.kind)
        self._submit_surely(commands.ReleaseHandoff(attempt.key))
        self._end_if_over(attempt)

    def _end_if_over(self, attempt: Attempt) -> None:
        if not (attempt.is_sequence_ended and attempt.is_released) or self._attempts.pop(attempt.key, None) is None:
            return
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        message = attempt_message(attempt.key)
        if attempt.failure is not None:
            self.metrics.attempt_ended("failed", attempt.failure.kind)
            attempt.session.post(pb.Event(attempt=message, failed=failed_message(attempt.failure)))
            return
        self.metrics.attempt_ended(attempt.finish_reason, "")
        num_tokens = len(attempt.spec.token_ids) - attempt.spec.num_prompt_tokens + (attempt.first_token_id is not None)
        attempt.session.post(pb.Event(attempt=message, finished=pb.Finished(reason=attempt.finish_reason, num_tokens=num_tokens)))

    # engine events ------------------------------------------------------------------------------------------------

    def on_step_events(self, step: StepEvents) -> None:
        for event in step.events:
            attempt = self._attempts.get(event.key)
            if attempt is not None:
                self._on_event(attempt, event, step.now)

    def _on_event(self, attempt: Attempt, event: Event, now: float) -> None:
        match event:
            case commands.ChunkComputed():
                attempt.computed_s = now
                if not attempt.is_released:
                    self.sender.blocks_final(attempt.handoff_id, event.num_computed_tokens, event.block_ids)
            case commands.Sampled():
                attempt.first_token_s = now
                attempt.first_token_id = event.token_ids[0]
                attempt.session.post(pb.Event(attempt=attempt_message(attempt.key), tokens=tokens_message(event)))
            case commands.PromptLogprobs():
                rated = prompt_logprobs_message(event)
                attempt.session.post(pb.Event(attempt=attempt_message(attempt.key), prompt_logprobs=rated))
            case commands.SequenceEnded():
                self._on_ended(attempt, event)
            case commands.Refused():
                attempt.failure = attempt.failure or error_from_kind(event.error_kind, event.message, event.retry_after_s or None)
                attempt.is_sequence_ended = True
                self._abort(attempt, event.error_kind)
                self._end_if_over(attempt)
            case commands.Reserved():
                raise AssertionError(f"a prefill worker never reserves, yet {event.key} was")

    def _on_ended(self, attempt: Attempt, event: commands.SequenceEnded) -> None:
        attempt.is_sequence_ended = True
        if attempt.first_token_id is not None and not attempt.is_aborted:
            self._post_timeline(attempt, event)
            final = self._final_reason(attempt, event)
            if final is not None:
                attempt.finish_reason = final
                if not attempt.is_released:
                    self.sender.abort(attempt.handoff_id, f"finished at prefill: {final}")
            elif not attempt.is_released:
                self.sender.close_handoff(attempt.handoff_id, attempt.first_token_id, {})
        elif not attempt.is_aborted:
            attempt.failure = attempt.failure or HandoffFailed(f"attempt {attempt.key} was dropped by the engine")
            self._abort(attempt, "dropped")
        self._end_if_over(attempt)

    @staticmethod
    def _final_reason(attempt: Attempt, event: commands.SequenceEnded) -> str | None:
        """The reason if token 0 already ended the request, None if decode goes on."""
        stop = attempt.spec.stop
        if attempt.first_token_id in stop.stop_token_ids and event.num_tokens > stop.min_new_tokens:
            return FinishReason.STOP.value
        if event.num_tokens >= stop.max_new_tokens:
            return FinishReason.LENGTH.value
        return None

    def _post_timeline(self, attempt: Attempt, event: commands.SequenceEnded) -> None:
        timeline = PrefillTimeline(
            received_s=attempt.received_s,
            scheduled_s=event.scheduled_s,
            computed_s=attempt.computed_s,
            first_token_s=attempt.first_token_s,
            num_cached_tokens=event.num_cached_tokens,
            num_chunks=event.num_chunks,
        )
        message = convert.prefill_timeline_to_pb(timeline)
        attempt.session.post(pb.Event(attempt=attempt_message(attempt.key), prefilled=message))

    # life cycle ---------------------------------------------------------------------------------------------------

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    @property
    def num_handoffs(self) -> int:
        return sum(not attempt.is_released for attempt in self._attempts.values())

    def drain(self) -> int:
        self.is_draining = True
        return self.num_attempts

    def abort_all(self, error: BatonError) -> None:
        """The drain's grace is over: what still runs ends with this error."""
        for attempt in list(self._attempts.values()):
            attempt.failure = attempt.failure or error
            self._abort(attempt, error.kind)

    @property
    def kv_fingerprint(self) -> str:
        return self.endpoint.layout.fingerprint()

    @property
    def unhealthy_reason(self) -> str | None:
        return self.endpoint.unhealthy_reason

    def describe(self) -> pb.WorkerDescription:
        return self.describe_worker()

    async def close(self) -> None:
        """Ends every handoff (receivers are told), then the links, then the memory that peers could read."""
        await self.sender.close()
        await self.endpoint.close()
