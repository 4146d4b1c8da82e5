"""What may come next in a constrained completion (JSON schema, regex, grammar), as the engine sees it. Pure.

A constraint is immutable and shared; its state is a function of the completion's tokens, so it is rebuilt from them after a
preemption, a handoff or a failover and never travels. The compiler is in engine/grammar.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class ConstraintState(Protocol):
    """Where one completion stands. Used by the engine thread only."""

    def accept(self, token_id: int) -> None:
        """The completion got this token. One that was not allowed leaves a state that allows only the stop tokens."""
        ...

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Writes the allowed next tokens: bit i % 32 of word i // 32 for token id i; mask [ceil(V / 32)]."""
        ...


class Constraint(Protocol):
    """A compiled grammar for one vocabulary."""

    def start(self, token_ids: Sequence[int]) -> ConstraintState:
        """The state behind these completion tokens."""
        ...
