"""The one wide log line and the metrics of a request that ended, from its timeline. Never a prompt, a text or a key.

Called exactly once per request that got as far as a permit; refusals before that are counted where they happen. Owns no state:
it writes to the log and the metrics it is given; times are seconds.
"""

from __future__ import annotations

from common.errors import BatonError, ClientCancelled
from common.log import EventLogger
from router.completion import Completion
from router.metrics import RouterMetrics
from router.request import ValidRequest
from router.timeline import RequestTimeline


def report_request(
    log: EventLogger,
    metrics: RouterMetrics,
    request: ValidRequest,
    timeline: RequestTimeline,
    completion: Completion,
    error: BatonError | None,
) -> None:
    if error is None and completion.finish_reason is not None:
        outcome = completion.finish_reason.value
    else:
        outcome = "cancelled" if isinstance(error, ClientCancelled) else "failed"
    metrics.requests_running.dec()
    metrics.requests_ended.labels(outcome=outcome, kind=error.kind if error is not None else "").inc()
    metrics.prompt_tokens.inc(request.num_prompt_tokens)
    metrics.cached_tokens.inc(timeline.num_cached_tokens)
    metrics.generation_tokens.inc(completion.num_tokens)
    metrics.e2e_s.observe(timeline.ended_s - timeline.received_s)
    if timeline.ttft_s is not None:
        metrics.ttft_s.observe(timeline.ttft_s)
    if completion.num_tokens > 1 and timeline.first_token_s:
        metrics.tpot_s.observe((timeline.ended_s - timeline.first_token_s) / (completion.num_tokens - 1))
    for stage, seconds in timeline.stages().items():
        metrics.stage_s.labels(stage=stage).observe(seconds)
    public = timeline.public(request.request_id)
    fields = {
        **public,
        "request": request.request_id,
        "key": request.context.key_id or None,
        "endpoint": request.endpoint.value,
        "model": request.model,
        "stream": request.stream,
        "outcome": outcome,
        "error_kind": error.kind if error is not None else None,
        "error": error.message if error is not None else None,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_tokens": completion.num_tokens,
        "num_cached_tokens": timeline.num_cached_tokens,
    }
    del fields["request_id"]
    log.event("request", **fields)
