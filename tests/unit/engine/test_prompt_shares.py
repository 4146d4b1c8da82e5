"""How a step's prompt tokens are shared: short ones pass, the oldest never waits for ever, nothing is wasted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.prompt_shares import share_out
from engine.sequence import Kind, Sequence
from tests.fakes.engine_driver import make_spec


def prompts(*lengths: int) -> list[Sequence]:
    return [Sequence(make_spec(index, range(length)), Kind.PREFILL, index) for index, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("num_tokens", "lengths", "expected"),
    [
        (256, [1500], {0: 256}),
        (256, [100], {0: 100}),
        (256, [1500, 100], {0: 156, 1: 100}),
        (256, [1500, 1500], {0: 128, 1: 128}),
        (256, [1500, 1500, 100], {0: 128, 2: 100, 1: 28}),
        (256, [60, 1500, 100], {0: 60, 2: 100, 1: 96}),
        (256, [1500, 90, 90, 90], {0: 128, 1: 90, 2: 38}),
        (1, [5, 1], {0: 1}),
        (3, [5, 1], {0: 2, 1: 1}),
        (8, [], {}),
    ],
)
def test_shares(num_tokens: int, lengths: list[int], expected: dict[int, int]) -> None:
    assert {sequence.arrival: share for sequence, share in share_out(num_tokens, prompts(*lengths))} == expected


@given(st.integers(1, 300), st.lists(st.integers(1, 400), max_size=8))
def test_everything_is_given_out_and_nobody_gets_more_than_it_lacks(num_tokens: int, lengths: list[int]) -> None:
    shares = {sequence.arrival: share for sequence, share in share_out(num_tokens, prompts(*lengths))}
    assert sum(shares.values()) == min(num_tokens, sum(lengths))
    assert all(1 <= share <= lengths[index] for index, share in shares.items())
    if lengths:
        assert shares[0] >= min(lengths[0], (num_tokens + 1) // 2)
