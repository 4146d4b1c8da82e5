"""When what happened to one request, and the stages computed from it for the log line, the metrics and the opt-in field.

Router times are monotonic seconds of this host; worker times are only used as differences, so clocks of different hosts never mix.
Pure. The stages add up: their sum is the time from the received request to the first token leaving the router.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common.types import HandoffTimeline, PrefillTimeline
from router.placement import Mode, Placement


@dataclass(slots=True)
class RequestTimeline:
    """Filled in as the request goes; 0.0 means it has not happened. Prefill and handoff are those of the last attempt that had them."""

    received_s: float
    tokenised_s: float = 0.0
    admitted_s: float = 0.0
    placed_s: float = 0.0
    first_token_s: float = 0.0
    first_out_s: float = 0.0
    ended_s: float = 0.0
    placement: Placement | None = None
    first_prefill: PrefillTimeline | None = None
    handoff: HandoffTimeline | None = None
    num_attempts: int = 0
    retry_reasons: list[str] = field(default_factory=list)

    @property
    def num_cached_tokens(self) -> int:
        return self.first_prefill.num_cached_tokens if self.first_prefill is not None else 0

    @property
    def ttft_s(self) -> float | None:
        end = self.first_out_s or self.first_token_s
        return end - self.received_s if end else None

    @property
    def transport(self) -> str:
        """Which data plane moved the KV: its scheme, `none` when it never moved."""
        return self.handoff.transport if self.handoff is not None and self.handoff.transport else "none"

    def stages(self) -> dict[str, float]:
        """Seconds per stage up to the first token out; a stage that was not reached is missing."""
        marks = [
            ("tokenise", self.received_s, self.tokenised_s),
            ("admit", self.tokenised_s, self.admitted_s),
            ("place", self.admitted_s, self.placed_s),
        ]
        stages = {name: end - start for name, start, end in marks if end}
        if self.first_token_s and self.placed_s:
            elapsed = self.first_token_s - self.placed_s
            stages.update(_split(elapsed, self.first_prefill))
        if self.first_out_s:
            stages["first_token_out"] = self.first_out_s - self.first_token_s
        return stages

    def handoff_stages(self) -> dict[str, float] | None:
        """Seconds between the steps of the handoff as the decode worker saw them, or None without one."""
        h = self.handoff
        if h is None:
            return None
        marks = [
            ("open", h.reserved_s, h.opened_s),
            ("first_frame", h.opened_s, h.first_frame_s),
            ("last_frame", h.first_frame_s, h.last_frame_s),
            ("commit", h.last_frame_s, h.committed_s),
            ("first_decode", h.committed_s, h.first_decode_s),
            ("after_last_announce", h.last_announced_s, h.committed_s),
        ]
        stages = {name: end - start for name, start, end in marks if start and end}
        return {**stages, "transfer": h.transfer_s, "scatter": h.scatter_s}

    @property
    def handover_s(self) -> float | None:
        """From prefill's last computed chunk to the commit on decode, where the sequence joins the next step.

        The one difference taken between two workers' clocks: exact when both run on one host (CLOCK_MONOTONIC is the host's). On two hosts
        it means nothing, so it is left out when it is negative or longer than the request.
        """
        h, prefill = self.handoff, self.first_prefill
        if h is None or prefill is None or not h.committed_s or not prefill.computed_s:
            return None
        handover_s = h.committed_s - prefill.computed_s
        return handover_s if 0.0 <= handover_s <= (self.ended_s or self.first_out_s) - self.received_s else None

    def public(self, request_id: str) -> dict[str, Any]:
        """The opt-in `baton` object: stages in seconds, what moved, by which transport, between which workers."""
        placement = self.placement
        h = self.handoff
        return {
            "request_id": request_id,
            "attempts": self.num_attempts,
            "mode": placement.mode.value if placement is not None else None,
            "prefill_worker": placement.prefill.worker_id if placement is not None and placement.prefill is not None else None,
            "decode_worker": placement.decode.worker_id if placement is not None and placement.decode is not None else None,
            "placement_reason": placement.reason if placement is not None else None,
            "transport": self.transport,
            "ttft_s": _rounded(self.ttft_s),
            "total_s": _rounded(self.ended_s - self.received_s) if self.ended_s else None,
            "stages": {name: _rounded(value) for name, value in self.stages().items()},
            "handoff": None
            if h is None
            else {
                "stages": {name: _rounded(value) for name, value in (self.handoff_stages() or {}).items()},
                "num_bytes": h.num_bytes,
                "num_blocks": h.num_blocks,
                "num_frames": h.num_frames,
                "num_cached_tokens": h.num_cached_tokens,
                "handover_s": _rounded(self.handover_s),
            },
            "prefill": None
            if self.first_prefill is None
            else {"num_cached_tokens": self.first_prefill.num_cached_tokens, "num_chunks": self.first_prefill.num_chunks},
            "retries": list(self.retry_reasons),
        }

    @property
    def mode(self) -> Mode | None:
        return self.placement.mode if self.placement is not None else None


def _split(elapsed_s: float, prefill: PrefillTimeline | None) -> dict[str, float]:
    """Placed → first token: the worker's own durations, and the rest (both ways of the wire, both event loops) as `dispatch`."""
    if prefill is None or not prefill.scheduled_s or not prefill.first_token_s:
        return {"dispatch": elapsed_s}
    queued_s = max(0.0, prefill.scheduled_s - prefill.received_s)
    computed_s = max(0.0, prefill.first_token_s - prefill.scheduled_s)
    return {"dispatch": elapsed_s - queued_s - computed_s, "prefill_queue": queued_s, "prefill": computed_s}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
