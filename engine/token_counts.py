"""Which tokens a sequence has, and how often its completion has each: what penalties are functions of.

Grows with the sequence and is rebuilt from its known tokens wherever the sequence goes on, so it never travels. Pure; it must not
know logits. Counts are occurrences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class TokenCounts:
    """Over `token_ids`, the sequence's own growing list, whose first `num_prompt_tokens` are the prompt."""

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self._token_ids = token_ids
        self._num_counted = num_prompt_tokens
        self._known = set(token_ids[:num_prompt_tokens])
        self._completion: dict[int, int] = {}

    def known_ids(self) -> Ids:
        """Distinct ids of prompt and completion, ascending."""
        self._count()
        return np.array(sorted(self._known), dtype=np.int64)

    def completion_counts(self) -> tuple[Ids, NDArray[np.float32]]:
        """Distinct ids of the completion and how often each occurs, in order of first occurrence."""
        self._count()
        ids = np.fromiter(self._completion.keys(), np.int64, len(self._completion))
        return ids, np.fromiter(self._completion.values(), np.float32, len(self._completion))

    def _count(self) -> None:
        """Takes in what is new; the list only ever grows."""
        for token_id in self._token_ids[self._num_counted :]:
            self._known.add(token_id)
            self._completion[token_id] = self._completion.get(token_id, 0) + 1
        self._num_counted = len(self._token_ids)
