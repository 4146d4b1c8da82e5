"""Tokens of two streams become one sequence: no gap, no duplicate, no silent disagreement."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Internal
from router import merge as merge_module
from router.merge import TokenMerge


def test_decode_tokens_wait_for_token_zero() -> None:
    merge = TokenMerge()
    assert merge.offer(1, [11, 12]) == []
    assert merge.has_gap
    assert merge.offer(0, [10]) == [10, 11, 12]
    assert not merge.has_gap and merge.tokens == [10, 11, 12]


def test_repeated_tokens_are_dropped_and_counted() -> None:
    merge = TokenMerge()
    merge.offer(0, [1, 2, 3])
    assert merge.offer(1, [2, 3, 4]) == [4]
    assert merge.num_duplicates == 2


def test_a_different_token_at_a_known_index_is_an_error() -> None:
    merge = TokenMerge()
    merge.offer(0, [1])
    with pytest.raises(Internal, match="token 0 arrived twice"):
        merge.offer(0, [2])


def test_a_new_attempt_forgets_early_tokens_but_keeps_emitted_ones() -> None:
    merge = TokenMerge()
    merge.offer(0, [1])
    merge.offer(2, [99])
    merge.begin_attempt()
    assert merge.offer(1, [2, 3]) == [2, 3]


def test_early_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_module, "EARLY_TOKENS_MAX", 4)
    merge = TokenMerge()
    with pytest.raises(Internal, match="token 0 is missing"):
        merge.offer(1, range(10))


@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_any_order_of_overlapping_pieces_gives_the_sequence(num_tokens: int, random) -> None:  # type: ignore[no-untyped-def]
    pieces = [(start, start + random.randint(1, 5)) for start in range(num_tokens) for _ in range(random.randint(1, 2))]
    random.shuffle(pieces)
    merge, out = TokenMerge(), []
    for start, end in pieces:
        out += merge.offer(start, [i * 7 for i in range(start, min(end, num_tokens))])
    assert out == merge.tokens == [i * 7 for i in range(num_tokens)]
