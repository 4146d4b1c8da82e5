"""Owns the state of one sequence: its known tokens, how many of them have KV, and which blocks that KV lies in.

A sequence knows no phase: computed tokens catch up with known tokens, and the token behind the last known one is sampled when
they have. It must not know the allocator, the queue or other sequences; positions and counts are tokens, block table entries
block ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from common.ids import AttemptKey
from common.types import FinishReason, StopConditions
from engine.batch import RowExtras
from engine.commands import SequenceSpec
from engine.token_counts import TokenCounts


class Kind(Enum):
    """What ends a sequence and who computes its prompt.

    GENERATE computes its prompt here and ends by its stop conditions; RECEIVE is the same, but gets the KV of its prompt by
    handoff; PREFILL ends after one token, and its blocks carry a handoff Hold that outlives it.
    """

    GENERATE = "generate"
    RECEIVE = "receive"
    PREFILL = "prefill"


class State(Enum):
    """WAITING (no blocks) → RUNNING → gone. RECEIVE starts as RESERVED (blocks, no KV). Preemption leads back to WAITING."""

    WAITING = "waiting"
    RESERVED = "reserved"
    RUNNING = "running"


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def finish_reason(token_id: int, token_index: int, stop: StopConditions) -> FinishReason | None:
    """Whether the completion token with this index ends its request. A stop token counts from index `min_new_tokens` on.

    `stop_token_ids` is all there is to match: the router has put the model's end tokens in, or left them out for ignore_eos.
    """
    if token_index >= stop.min_new_tokens and token_id in stop.stop_token_ids:
        return FinishReason.STOP
    if token_index + 1 >= stop.max_new_tokens:
        return FinishReason.LENGTH
    return None


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of the engine. `arrival` orders sequences: the lower it is, the later it is preempted.

    Invariants: num_computed < len(token_ids) while RUNNING; KV of positions [0, num_computed) lies in `block_ids`;
    `block_keys` are the prefix keys of full blocks of `token_ids`, as many as were needed so far. While it has blocks, its block
    table is row `table_row` of the model runner's tables, which has been told the first `num_tabled_blocks` of them.
    """

    spec: SequenceSpec
    kind: Kind
    arrival: int
    state: State = State.WAITING
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    has_handoff: bool = field(init=False)
    num_cached_tokens: int | None = None
    num_chunks: int = 0
    num_reported_blocks: int = 0
    scheduled_s: float | None = None
    owner: str = field(init=False)
    table_row: int = -1
    num_tabled_blocks: int = 0
    extras: RowExtras | None = field(init=False)
    num_rated: int = 0
    """Prompt tokens whose logprobs were reported, position 0 (which has none) not counted."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.token_ids)
        self.owner = sequence_owner(self.spec.key)
        self.has_handoff = self.kind is Kind.PREFILL
        self.extras = row_extras(self.spec, self.token_ids)

    @property
    def key(self) -> AttemptKey:
        return self.spec.key

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def next_token_index(self) -> int:
        """Index of the completion token that comes behind the known tokens."""
        return len(self.token_ids) - self.spec.num_prompt_tokens

    @property
    def num_tokens_max(self) -> int:
        """Known tokens at the very end. KV of the last token sampled is never needed, so it lies on no block of its own."""
        if self.kind is Kind.PREFILL:
            return len(self.spec.token_ids) + 1
        return self.spec.num_prompt_tokens + self.spec.stop.max_new_tokens

    @property
    def rates_prompt(self) -> bool:
        """Whether logprobs of prompt tokens are still to be reported here. Who receives a prompt's KV leaves that to who computed it."""
        spec = self.spec
        return (
            spec.num_prompt_logprobs is not None and self.kind is not Kind.RECEIVE and self.num_rated < spec.num_prompt_tokens - 1
        )

    @property
    def is_preemptible(self) -> bool:
        """Whether a running sequence may lose its blocks. Of a prefill-only one a peer may be reading them: freeing wins nothing."""
        return self.kind is not Kind.PREFILL


def row_extras(spec: SequenceSpec, token_ids: list[int]) -> RowExtras | None:
    """What sampling needs of this sequence beside its parameters; None for most. `token_ids` is its own list of known tokens."""
    sampling = spec.sampling
    if not sampling.has_penalties and not sampling.logit_bias and spec.num_logprobs is None:
        return None
    counts = TokenCounts(token_ids, spec.num_prompt_tokens) if sampling.has_penalties else None
    return RowExtras(token_ids, spec.num_prompt_tokens, spec.num_logprobs, counts=counts)


def arrival_of(sequence: Sequence) -> int:
    """The sort key of every list of sequences."""
    return sequence.arrival


def sequence_owner(key: AttemptKey) -> str:
    return f"seq:{key}"


def handoff_owner(key: AttemptKey) -> str:
    return f"handoff:{key}"
