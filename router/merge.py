"""Puts the tokens of the two legs into one sequence: index order, no gap, no duplicate.

Token 0 of an attempt comes from prefill, the rest from decode, on two streams with no order between them. Pure; it owns the list
of completion tokens of the request across all attempts, indexes are completion token indexes.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import Internal

EARLY_TOKENS_MAX = 4096
"""Tokens that may wait for an earlier one; more means that the earlier one was lost."""


class TokenMerge:
    """The completion tokens so far. `tokens` is contiguous from index 0; early ones wait until the gap closes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._early: dict[int, int] = {}
        self.num_duplicates = 0

    @property
    def next_index(self) -> int:
        return len(self.tokens)

    @property
    def has_gap(self) -> bool:
        return bool(self._early)

    def begin_attempt(self) -> None:
        """Forgets what an ended attempt sent too early; a new attempt samples those tokens again."""
        self._early.clear()

    def offer(self, first_index: int, token_ids: Sequence[int]) -> list[int]:
        """Takes tokens in any order, returns those that became contiguous. Raises Internal when a repeated token differs."""
        start = self.next_index
        for offset, token_id in enumerate(token_ids):
            self._take(first_index + offset, token_id)
        while self._early:
            token = self._early.pop(self.next_index, None)
            if token is None:
                break
            self.tokens.append(token)
        return self.tokens[start:]

    def _take(self, index: int, token_id: int) -> None:
        known = self.tokens[index] if index < self.next_index else self._early.get(index)
        if known is not None:
            if known != token_id:
                raise Internal(f"token {index} arrived twice with different values ({known}, {token_id})")
            self.num_duplicates += 1
        elif index == self.next_index:
            self.tokens.append(token_id)
        elif len(self._early) >= EARLY_TOKENS_MAX:
            raise Internal(f"token {self.next_index} is missing while {len(self._early)} later ones arrived")
        else:
            self._early[index] = token_id
