"""What the worker asks of the engine thread and what it is told. Plain values; the only border between the two.

Commands enter a bounded queue and take effect at the next step border, in order. Events leave as one batch per step.
A sequence is named by its AttemptKey. This module is pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.ids import AttemptKey
from common.types import FinishReason, SamplingParams, StopConditions, TokenLogprobs
from engine.constraint import Constraint


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """A sequence to compute. `token_ids` = prompt + tokens emitted by earlier attempts; never empty.

    The next sampled token has index `len(token_ids) - num_prompt_tokens`. `cache_salt` separates tenants in the prefix
    cache. Raises nothing: the services validate before they build one.

    `num_choices` completions share the prompt: their choice indexes are `sampling.choice`, +1, ... More than one only while no
    completion token exists; each is then a sequence of its own. `constraint` says which tokens may come next (None: any).
    `num_logprobs` and `num_prompt_logprobs`: alternatives to report with each token, None reports nothing. Of waiting sequences the
    lower `priority` goes first.
    """

    key: AttemptKey
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopConditions
    cache_salt: bytes = b""
    num_choices: int = 1
    constraint: Constraint | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    priority: int = 0


# ---- commands ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generate:
    """Compute the prompt here and generate until a stop condition."""

    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the prompt, sample one token, then end; each finished chunk is reported with its blocks.

    All blocks of the sequence get the extra Hold `handoff` when the sequence is added, so they stay after the sequence itself has ended,
    until ReleaseHandoff.
    """

    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class Reserve:
    """Allocate all blocks for the prompt (prefix hits shared) with room to grow, or refuse. Computes nothing yet."""

    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class Commit:
    """The KV of a reserved sequence has arrived: `first_token_ids` are its next known tokens, one per choice, join the running batch.

    The tokens at the next index were sampled by prefill; the engine applies stop conditions to them but never reports them as new.
    """

    key: AttemptKey
    first_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseHandoff:
    """Drop the `handoff` Hold of a prefill-only sequence (acknowledged, refused or settled)."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Abort:
    """End the sequence at the next step border and free what it holds, except blocks under a handoff Hold. Idempotent.

    For a reserved sequence the caller first settles the transfer: after this command its blocks may be reused. `choice` ends
    one of several choices; of an attempt whose choices have not parted yet it then starts without that one.
    """

    key: AttemptKey
    reason: str
    choice: int | None = None


Command = Generate | Prefill | Reserve | Commit | ReleaseHandoff | Abort

# ---- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks for token positions [0, len(token_ids)); `num_cached_tokens` (whole blocks) are there already."""

    key: AttemptKey
    block_ids: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A Generate, Prefill or Reserve that cannot be taken. `error_kind` is of the error table."""

    key: AttemptKey
    error_kind: str
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """Prefill only: KV of token positions [0, num_computed_tokens) is final in these blocks (the last may be partial).

    `block_ids` is the block table up to there; `first_new_block_index` is the first one not reported before as full.
    """

    key: AttemptKey
    num_computed_tokens: int
    num_cached_tokens: int
    first_new_block_index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """New tokens of one sequence in this step; `first_index` is the token index of `token_ids[0]`.

    `logprobs` has one entry per token if they were asked for, and none otherwise.
    """

    key: AttemptKey
    first_index: int
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the prompt tokens at positions `first_position`, +1, ...; each prompt position but 0 comes exactly once, in order."""

    key: AttemptKey
    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The sequence is gone from the scheduler. `num_tokens` counts completion tokens, earlier attempts included.

    `num_cached_tokens` is the prefix hit at its first scheduling; `scheduled_s` the time of its first step. `is_last`: no other
    choice of the attempt is left. A prefill-only sequence ends once, for all its choices.
    """

    key: AttemptKey
    reason: FinishReason
    num_tokens: int
    num_cached_tokens: int
    num_chunks: int
    scheduled_s: float
    choice: int = 0
    is_last: bool = True


Event = Reserved | Refused | ChunkComputed | Sampled | PromptLogprobs | SequenceEnded


@dataclass(frozen=True, slots=True)
class StepEvents:
    """All that one step (or one command without a step) produced, in order. `now` is when the step's results were known."""

    now: float
    events: tuple[Event, ...]
