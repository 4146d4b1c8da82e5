"""Serves one request from placement to its last token: attempts, merging, retries, resume, abort. The only place that retries.

Each request runs in a task of its own that no client connection owns: a disconnect asks it to stop, and its clean-up is synchronous, so
nothing can interrupt it half-way. Owns the request's tokens and epochs; knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from common.clock import Clock
from common.errors import (
    BatonError,
    ClientCancelled,
    DeadlineExceeded,
    Draining,
    Internal,
    NoWorker,
    Overloaded,
    StoreUnavailable,
)
from common.ids import AttemptKey
from common.log import EventLogger
from common.rpc import serving_pb2 as pb
from common.state.store import JournalEntry, StateStore
from common.types import FinishReason, Role
from router import wire
from router.admission import Permit
from router.attempt import Attempt
from router.call import Call, OrchestratorSettings, RetrySlot
from router.clients import WorkerPool
from router.completion import Completion
from router.events import Finished, HandedOver, LegEvent, LegRole, Prefilled, PromptRated, Tokens
from router.fleet import Fleet
from router.journal import Journal
from router.logprobs import RatedToken, Ratings
from router.metrics import RouterMetrics
from router.output import Ended, Errored, OutputBuffer, OutputSignals, Usage
from router.placement import Demand, Placement, PlacementPolicy, place
from router.report import report_request
from router.request import ValidRequest
from router.retry import AttemptFailed
from router.timeline import RequestTimeline
from router.tokenizer import ModelTokenizer

LAST_WORD_TIMEOUT_S = 1.0
"""After the last token is known: how long to wait for the worker's closing message, which only adds to the timeline."""


class Orchestrator:
    """Starts calls and keeps their tasks; `close` cancels what is left."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        pool: WorkerPool,
        store: StateStore,
        journal: Journal,
        tokenizer: ModelTokenizer,
        policy: PlacementPolicy,
        settings: OrchestratorSettings,
        router_id: str,
        clock: Clock,
        metrics: RouterMetrics,
        log: EventLogger,
    ) -> None:
        self._fleet = fleet
        self._pool = pool
        self._store = store
        self._journal = journal
        self._tokenizer = tokenizer
        self._policy = policy
        self._settings = settings
        self._router_id = router_id
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._retry_slots = asyncio.Semaphore(settings.retries_concurrent_max)
        self._calls: set[Call] = set()
        self.idle = asyncio.Event()  # set while no request is running
        self.idle.set()
        self._rotation = 0

    @property
    def num_active(self) -> int:
        return len(self._calls)

    def start(self, request: ValidRequest, timeline: RequestTimeline, permit: Permit, signals: OutputSignals) -> Call:
        """Begins to serve; the permit belongs to the call from here on. `signals` wake the reader of its output."""
        is_rated = request.num_logprobs is not None
        completion = Completion(request.stop, request.stop_strings, self._tokenizer.detokenizer(), keeps_offsets=is_rated)
        output = OutputBuffer(self._settings.output_chars_max, signals)
        ratings = Ratings(self._tokenizer) if is_rated else None
        call = Call(request, timeline, permit, completion, output, self._clock.wall(), ratings)
        self._calls.add(call)
        self.idle.clear()
        self._metrics.requests_running.inc()
        self._metrics.requests_started.labels(endpoint=request.endpoint.value).inc()
        self._write_journal(call, "admitted")
        call.task = asyncio.create_task(self._run(call), name=f"request {request.request_id}")
        return call

    def cancel_all(self, error: BatonError) -> None:
        for call in list(self._calls):
            call.cancel(error)

    async def close(self) -> None:
        """Cancels every call and waits until their (synchronous) clean-up is done."""
        self.cancel_all(Draining("the router stopped"))
        tasks = [call.task for call in self._calls if call.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    # ---- one call ----------------------------------------------------------------------------------------------------

    async def _run(self, call: Call) -> None:
        """The task of a request: whatever happens, exactly one end reaches the output, the journal, the log and the metrics."""
        call.is_started = True
        error: BatonError | None = call.cancel_error
        try:
            if error is None:
                async with asyncio.timeout(call.timeout_s(self._settings)):
                    await self._serve(call)
        except TimeoutError:
            error = DeadlineExceeded(f"the request was not finished within {call.timeout_s(self._settings):g} s")
        except BatonError as caught:
            error = caught
        except asyncio.CancelledError:
            error = call.cancel_error or Draining("the router stopped")
            raise
        except Exception as caught:  # the top of a request: neighbours must not notice
            self._log.error("request_crashed", request=call.request.request_id)
            error = Internal(f"the router failed: {type(caught).__name__}")
        finally:
            self._end(call, error)

    def _end(self, call: Call, error: BatonError | None) -> None:
        now = self._clock.monotonic()
        call.timeline.ended_s = now
        if error is None:
            assert call.completion.finish_reason is not None
            state = "finished"
            usage = Usage(call.request.num_prompt_tokens, call.num_completion_tokens, call.timeline.num_cached_tokens)
            token_ids = call.merge.tokens[: usage.num_completion_tokens]
            shown = call.timeline.public(call.request.request_id) | {"token_ids": list(token_ids)}
            reason = call.completion.finish_reason if call.request.has_completion else FinishReason.LENGTH
            call.output.end(Ended(reason, usage, shown))
        else:
            state = "cancelled" if isinstance(error, ClientCancelled) else "failed"
            call.output.end(Errored(error))
        call.permit.release(now)
        self._calls.discard(call)
        if not self._calls:
            self.idle.set()
        self._write_journal(call, state, error.kind if error is not None else "")
        self._metrics.tokens_duplicate.inc(call.merge.num_duplicates)
        report_request(self._log, self._metrics, call.request, call.timeline, call.completion, error)

    async def _serve(self, call: Call) -> None:
        """Attempts until the completion is finished. Raises the error the request ends with."""
        while True:
            is_retry = call.epoch > 0
            if is_retry:
                if self._retry_slots.locked():
                    self._metrics.retries_delayed.inc()
                await self._retry_slots.acquire()
            slot = RetrySlot(self._retry_slots if is_retry else None)
            try:
                placement = await self._place(call)
                await self._new_epoch(call)
                await self._attempt(call, placement, slot)
                return
            except AttemptFailed as failure:
                self._failed(call, failure)
            finally:
                slot.release()

    def _failed(self, call: Call, failure: AttemptFailed) -> None:
        """Returns when the request may be tried again, raises what it ends with otherwise."""
        assert call.timeline.placement is not None
        may_retry = call.retries.record(failure, call.timeline.placement, call.has_emitted)
        fields = {
            "request": call.request.request_id,
            "epoch": call.epoch,
            "leg": failure.role.value,
            "worker": failure.worker[0],
            "kind": failure.error.kind,
            "error": failure.error.message,
            "tokens": call.merge.next_index,
            "retry": may_retry,
        }
        self._log.warn("attempt_failed", **fields)
        self._metrics.attempt_failures.labels(kind=failure.error.kind, leg=failure.role.value).inc()
        if not may_retry:
            raise failure.error
        call.timeline.retry_reasons.append(f"{failure.role.value} {failure.worker[0]}: {failure.error.kind}")
        self._metrics.retries.labels(kind=failure.error.kind).inc()

    async def _place(self, call: Call) -> Placement:
        """Chooses workers, waiting a bounded time for one to appear. A stream that has begun waits longer than a new request."""
        wait_s = self._settings.resume_wait_s if call.has_emitted else self._settings.worker_wait_s
        give_up_s = self._clock.monotonic() + wait_s
        demand = Demand(call.request.num_prompt_tokens + call.merge.next_index, call.request.num_tokens_max)
        while True:
            try:
                prefill, decode = self._fleet.candidates(Role.PREFILL), self._fleet.candidates(Role.DECODE)
                placement = place(demand, prefill, decode, self._policy, call.retries.exclusions(), self._rotation)
                break
            except NoWorker:
                left_s = give_up_s - self._clock.monotonic()
                if left_s <= 0:
                    raise
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._fleet.changed()
            except Overloaded as error:
                left_s = give_up_s - self._clock.monotonic()
                if left_s <= 0 or not call.has_emitted:
                    raise
                await asyncio.sleep(min(left_s, error.retry_after_s or 1.0))  # the worker's own hint; then it may have room
                call.retries.forget_busy()
        self._rotation += 1
        call.timeline.placement = placement
        call.timeline.placed_s = call.timeline.placed_s or self._clock.monotonic()
        self._metrics.placements.labels(mode=placement.mode.value, because=placement.local_because or "load").inc()
        return placement

    async def _new_epoch(self, call: Call) -> None:
        """Request ids are random and new, so the first epoch is 1 without asking; later ones come from the store if it answers.

        Only this router makes epochs for the request now, so counting on is safe while the store is away.
        """
        epoch = call.epoch + 1
        if epoch > 1:
            try:
                epoch = max(epoch, await self._store.next_epoch(call.request.request_id))
            except StoreUnavailable:
                self._metrics.store_errors.labels(operation="next_epoch").inc()
        call.epoch = epoch

    async def _attempt(self, call: Call, placement: Placement, slot: RetrySlot) -> None:
        attempt = Attempt(AttemptKey(call.request.request_id, call.epoch), placement, self._pool)
        call.merge.begin_attempt()
        if not call.has_emitted:
            call.prompt_ratings.begin_attempt()
        call.timeline.num_attempts += 1
        reason = "attempt failed"
        try:
            attempt.start(self._spec(call), call.request.num_prompt_tokens + call.merge.next_index)
            self._write_journal(call, "placed")
            await self._follow(call, attempt, slot)
            reason = "finished"
        except asyncio.CancelledError:
            reason = call.cancel_error.kind if call.cancel_error is not None else "DeadlineExceeded"
            raise
        finally:
            attempt.end(reason)

    def _spec(self, call: Call) -> pb.SequenceSpec:
        """Prompt plus what was emitted: a later attempt goes on at the next token index and never samples an earlier one again."""
        request = call.request
        left_s = call.timeline.received_s + call.timeout_s(self._settings) - self._clock.monotonic()
        token_ids = [*request.prompt_token_ids, *call.merge.tokens]
        return wire.sequence_spec(
            token_ids,
            request.num_prompt_tokens,
            request.sampling,
            request.stop,
            max(left_s, 0.001),
            request.num_logprobs,
            None if call.has_emitted else request.num_prompt_logprobs,
            request.context.cache_salt,
        )

    async def _follow(self, call: Call, attempt: Attempt, slot: RetrySlot) -> None:
        """Takes events until the completion is finished. Raises AttemptFailed."""
        ended: Finished | None = None
        first_index = call.merge.next_index
        while True:
            role, event = await attempt.next()
            self._note(call, event)
            if isinstance(event, Tokens):
                slot.release()
                self._take_tokens(call, event)
                if call.completion.finish_reason is not None:
                    is_ended_by_prefill = role is LegRole.PREFILL and call.merge.next_index == first_index + 1
                    has_ended = ended is not None or is_ended_by_prefill or call.completion.matched_stop_string
                    await self._hear_last_words(call, attempt, has_ended)
                    return
            elif isinstance(event, Finished) and event.reason != "handed_over":
                ended = event
            if ended is not None and call.merge.next_index >= ended.num_tokens:
                attempt.leave(LegRole.PREFILL)
                self._emit(call, call.completion.finish(FinishReason(ended.reason)))
                return

    async def _hear_last_words(self, call: Call, attempt: Attempt, has_ended: bool) -> None:
        """All tokens are there; waits shortly for what the timeline and the count of cached tokens lack.

        `has_ended`: no closing message of a decode leg is worth waiting for.
        """
        with contextlib.suppress(TimeoutError, AttemptFailed):
            async with asyncio.timeout(LAST_WORD_TIMEOUT_S):
                while not has_ended or call.timeline.first_prefill is None:
                    role, event = await attempt.next()
                    self._note(call, event)
                    has_ended = has_ended or (isinstance(event, Finished) and role is not LegRole.PREFILL)
        if not call.completion.matched_stop_string:  # the workers know the end too; a stop string only the router sees
            attempt.leave(LegRole.PREFILL)

    def _take_tokens(self, call: Call, event: Tokens) -> None:
        is_first = not call.has_emitted
        if call.ratings is not None:
            call.ratings.note(event.first_index, event.logprobs)
        tokens = call.merge.offer(event.first_index, event.token_ids)
        if not tokens:
            return
        if is_first:
            call.timeline.first_token_s = self._clock.monotonic()
            self._write_journal(call, "streaming")
        completion, num_before = call.completion, call.completion.num_tokens
        text = completion.push(tokens)
        rated: tuple[RatedToken, ...] = ()
        if (
            call.ratings is not None
        ):  # each token's logprobs leave with the event that brought it, also while its text is held back
            num_new = completion.num_tokens - num_before
            rated = call.ratings.take(tokens[:num_new], completion.offsets[num_before:])
        if not call.request.has_completion:
            text, rated = "", ()
        if is_first and call.request.echoes_prompt:
            echoed, prompt_rated = self._echo(call)
            call.output.put_prompt(echoed, prompt_rated)
            call.num_echoed_chars = len(echoed)
        if call.num_echoed_chars:
            rated = tuple(replace(token, offset=token.offset + call.num_echoed_chars) for token in rated)
        if text or rated or is_first:
            self._emit(call, text, rated)

    def _echo(self, call: Call) -> tuple[str, tuple[RatedToken, ...]]:
        """The prompt as the client gets it back. Its logprobs were reported before the first token."""
        token_ids = call.request.prompt_token_ids
        text, offsets = self._tokenizer.echo(token_ids)
        if call.request.num_prompt_logprobs is None:
            return text, ()
        return text, call.prompt_ratings.take(token_ids, offsets, self._tokenizer)

    def _emit(self, call: Call, text: str, rated: tuple[RatedToken, ...] = ()) -> None:
        if not call.output.put(text, rated):
            self._metrics.slow_clients.inc()
            raise ClientCancelled(f"the client left more than {self._settings.output_chars_max} characters untaken")

    def _note(self, call: Call, event: LegEvent) -> None:
        """Keeps what an event says about the timeline."""
        timeline = call.timeline
        if isinstance(event, PromptRated):
            call.prompt_ratings.note(event.first_position, event.logprobs)
        elif isinstance(event, Prefilled):
            timeline.first_prefill = timeline.first_prefill or event.timeline
        elif isinstance(event, HandedOver):
            timeline.handoff = event.timeline
        elif isinstance(event, Finished):
            timeline.first_prefill = timeline.first_prefill or event.prefill
            timeline.handoff = event.handoff or timeline.handoff

    def _write_journal(self, call: Call, state: str, error_kind: str = "") -> None:
        placement = call.timeline.placement
        self._journal.put(
            JournalEntry(
                request_id=call.request.request_id,
                state=state,
                epoch=max(call.epoch, 1),
                router_id=self._router_id,
                model=call.request.model,
                prefill_worker=placement.prefill.worker_id if placement is not None and placement.prefill is not None else "",
                decode_worker=placement.decode.worker_id if placement is not None and placement.decode is not None else "",
                num_prompt_tokens=call.request.num_prompt_tokens,
                num_tokens=call.merge.next_index,
                created_wall_s=call.created_wall_s,
                error_kind=error_kind,
            )
        )
