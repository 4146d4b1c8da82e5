"""Claims about stop conditions and the arithmetic of one sequence."""

from __future__ import annotations

import pytest

from common.types import FinishReason, StopConditions
from engine.sequence import Kind, Sequence, finish_reason, num_blocks_for
from tests.fakes.engine_driver import make_spec


@pytest.mark.parametrize(
    ("token_id", "token_index", "expected"),
    [
        (7, 0, FinishReason.STOP),
        (8, 0, None),
        (8, 3, None),
        (8, 4, FinishReason.LENGTH),
        (7, 4, FinishReason.STOP),  # a stop token as the very last allowed one is a stop
    ],
)
def test_stop_tokens_and_length(token_id: int, token_index: int, expected: FinishReason | None) -> None:
    assert finish_reason(token_id, token_index, StopConditions(max_new_tokens=5, stop_token_ids=(7, 9))) is expected


def test_a_stop_token_counts_only_from_min_new_tokens_on() -> None:
    stop = StopConditions(max_new_tokens=5, min_new_tokens=2, stop_token_ids=(7,))
    assert [finish_reason(7, index, stop) for index in range(3)] == [None, None, FinishReason.STOP]


def test_the_token_index_of_a_resumed_sequence_counts_earlier_tokens() -> None:
    sequence = Sequence(make_spec("a", [1, 2, 3], 9, emitted=(50, 51)), Kind.GENERATE, 1)
    assert sequence.next_token_index == 2
    assert sequence.num_tokens_max == 12, "the limit counts from the prompt, not from what this attempt adds"


def test_a_prefill_only_sequence_needs_no_room_for_its_completion() -> None:
    assert Sequence(make_spec("a", range(10), 1000), Kind.PREFILL, 1).num_tokens_max == 11


def test_blocks_for_tokens_round_up() -> None:
    assert [num_blocks_for(count, 4) for count in (0, 1, 3, 4, 5, 8, 9)] == [0, 1, 1, 1, 2, 2, 3]
