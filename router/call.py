"""One request being served, as the orchestrator and the HTTP side share it, and the bounds it runs under.

Owns the request's tokens, text, retries and output; does nothing by itself. States: started → running → ended, where `cancel` may come
at any time; times are seconds.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from common.errors import BatonError
from router.admission import Permit
from router.completion import Completion
from router.logprobs import PromptRatings, Ratings
from router.merge import TokenMerge
from router.output import OutputBuffer
from router.request import ValidRequest
from router.retry import RetryState
from router.timeline import RequestTimeline


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """Bounds of a request. Seconds, characters and counts."""

    request_timeout_s: float
    worker_wait_s: float
    resume_wait_s: float
    output_chars_max: int
    retries_concurrent_max: int


class Call:
    """A request being served: what the HTTP side sees of it."""

    def __init__(
        self,
        request: ValidRequest,
        timeline: RequestTimeline,
        permit: Permit,
        completion: Completion,
        output: OutputBuffer,
        created_wall_s: float,
        ratings: Ratings | None,
    ) -> None:
        self.request = request
        self.timeline = timeline
        self.output = output
        self.permit = permit
        self.completion = completion
        self.created_wall_s = created_wall_s
        self.ratings = ratings  # None: nobody asked for logprobs
        self.prompt_ratings = PromptRatings()
        self.num_echoed_chars = 0
        self.merge = TokenMerge()
        self.retries = RetryState()
        self.epoch = 0
        self.is_started = False
        self.cancel_error: BatonError | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def has_emitted(self) -> bool:
        return self.merge.next_index > 0

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that the client sees and is told of."""
        return self.completion.num_tokens if self.request.has_completion else 0

    def timeout_s(self, settings: OrchestratorSettings) -> float:
        """Seconds from arrival that this request may take: the client's own deadline within the operator's."""
        return min(self.request.context.deadline_s or settings.request_timeout_s, settings.request_timeout_s)

    def cancel(self, error: BatonError) -> None:
        """Asks the request to stop; its task aborts both legs. Idempotent, the first reason stays."""
        if self.cancel_error is None and self.task is not None and not self.task.done():
            self.cancel_error = error
            if self.is_started:  # a task cancelled before its first step would never run its clean-up
                self.task.cancel()


class RetrySlot:
    """One of the slots that bound how many retries run at once; held until the attempt's first token, given back once."""

    def __init__(self, semaphore: asyncio.Semaphore | None) -> None:
        self._semaphore = semaphore

    def release(self) -> None:
        if self._semaphore is not None:
            self._semaphore.release()
            self._semaphore = None
