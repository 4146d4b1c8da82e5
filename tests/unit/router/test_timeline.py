"""Stages add up to the time to first token; clocks of different hosts are never mixed."""

from __future__ import annotations

import pytest

from common.types import HandoffTimeline, PrefillTimeline
from router.timeline import RequestTimeline


def test_stages_add_up_even_when_the_workers_clock_has_another_origin() -> None:
    prefill = PrefillTimeline(received_s=9000.0, scheduled_s=9000.1, computed_s=9000.5, first_token_s=9000.6)
    timeline = RequestTimeline(100.0, 100.01, 100.02, 100.03, 100.80, 100.81, first_prefill=prefill)
    stages = timeline.stages()
    assert list(stages) == ["tokenise", "admit", "place", "dispatch", "prefill_queue", "prefill", "first_token_out"]
    assert sum(stages.values()) == pytest.approx(timeline.ttft_s) == pytest.approx(0.81)
    assert stages["prefill_queue"] == pytest.approx(0.1) and stages["prefill"] == pytest.approx(0.5)


def test_stages_not_reached_are_missing() -> None:
    assert RequestTimeline(1.0, 1.5).stages() == {"tokenise": 0.5}
    assert RequestTimeline(1.0).ttft_s is None and RequestTimeline(1.0).handoff_stages() is None


def test_handoff_is_reported_with_its_transport() -> None:
    handoff = HandoffTimeline(1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, num_frames=3, num_bytes=4096, transport="ucx", transfer_s=0.05)
    public = RequestTimeline(0.5, handoff=handoff).public("r")
    assert public["transport"] == "ucx" and public["handoff"]["num_bytes"] == 4096
    assert public["handoff"]["stages"]["first_decode"] == pytest.approx(0.1)
    assert RequestTimeline(0.5).public("r")["transport"] == "none"
