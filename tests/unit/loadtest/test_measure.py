"""What a stream's meter records and what it calls a failure."""

from __future__ import annotations

import json

import pytest

from baton.openai_stream import StreamFailed
from loadtest import measure
from loadtest.measure import Outcome, StreamMeter


def event(**payload: object) -> str:
    return "data: " + json.dumps(payload)


def piece(text: str) -> str:
    return event(choices=[{"delta": {"content": text}}])


def usage(num_tokens: int) -> str:
    return event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": num_tokens})


def run(lines: list[str], num_asked: int = 3) -> Outcome:
    meter = StreamMeter("chat", num_asked, 10.0)
    for index, line in enumerate(lines):
        meter.feed(line, 11.0 + index)
    return meter.end(20.0)


WHOLE = [piece("a"), piece("b"), piece("c"), usage(3), "data: [DONE]"]


def test_a_whole_answer_has_ttft_gaps_and_no_fault() -> None:
    meter = StreamMeter("chat", 3, 10.0)
    times = [10.5, 10.75, 11.75, 12.0, 12.0]
    assert [meter.feed(line, now) for line, now in zip(WHOLE, times, strict=True)] == [0.5, 0.25, 1.0, None, None]
    outcome = meter.end(12.0)
    assert outcome.record.error == "" and outcome.num_lost == 0
    assert (outcome.record.ttft_s, outcome.record.gaps_s, outcome.record.tpot_s) == (0.5, [0.25, 1.0], 0.625)


def test_role_event_blank_lines_and_comments_are_no_pieces() -> None:
    assert (
        len(run([event(choices=[{"delta": {"role": "assistant", "content": ""}}]), "", ": ping", *WHOLE]).record.piece_times_s)
        == 3
    )


@pytest.mark.parametrize(
    ("lines", "error", "num_lost"),
    [
        ([piece("a"), usage(2), "data: [DONE]"], measure.LOST, 1),
        ([piece("a"), usage(4), "data: [DONE]"], measure.EXTRA, 0),
        ([piece("a"), usage(3)], measure.NO_DONE, 0),
        ([piece("a"), usage(1)], measure.NO_DONE, 0),
        ([piece("a"), "data: [DONE]"], measure.NO_USAGE, 0),
        ([usage(3), "data: [DONE]"], measure.NO_TEXT, 0),
        ([], measure.NO_DONE, 0),
    ],
)
def test_faults_of_a_stream_that_ended_in_order(lines: list[str], error: str, num_lost: int) -> None:
    outcome = run(lines)
    assert (outcome.record.error, outcome.num_lost) == (error, num_lost)


def test_one_piece_of_several_tokens_is_not_a_loss() -> None:
    assert run([piece("abc"), usage(3), "data: [DONE]"]).record.error == ""


@pytest.mark.parametrize("line", [event(error={"message": "gone", "type": "x"}), "data: {", "data: [1]"])
def test_error_events_and_broken_data_are_raised(line: str) -> None:
    with pytest.raises(StreamFailed):
        run([piece("a"), line])


def test_an_event_after_done_is_a_failure() -> None:
    with pytest.raises(StreamFailed, match="after"):
        run([*WHOLE, piece("d")])


def test_the_routers_placement_is_kept() -> None:
    assert run([event(choices=[], baton={"mode": "disaggregated"}), *WHOLE]).mode == "disaggregated"
