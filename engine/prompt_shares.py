"""How the prompt tokens of one step are shared among the prompts under way. Pure.

Shortest remainder first keeps the mean wait for a first token low: a chat is not held up by a long document before it. The oldest
prompt has half of the step for itself, so that nobody waits for ever however many short ones come.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from engine.sequence import Sequence


def share_out(num_tokens: int, prompts: Seq[Sequence]) -> Iterator[tuple[Sequence, int]]:
    """Shares of at least one token of `num_tokens` (at least 1) for `prompts`, oldest first as given.

    All tokens are given out as long as anybody lacks some.
    """
    if not prompts:
        return
    oldest, *others = prompts
    num_others = sum(sequence.num_uncomputed for sequence in others)
    share = min(oldest.num_uncomputed, max(num_tokens - num_others, (num_tokens + 1) // 2))
    yield oldest, share
    num_left = num_tokens - share
    for sequence in sorted(others, key=lambda sequence: sequence.num_uncomputed):  # stable: the older first among equals
        if not num_left:
            return
        share = min(sequence.num_uncomputed, num_left)
        num_left -= share
        yield sequence, share
