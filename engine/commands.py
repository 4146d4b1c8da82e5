"""What the worker asks of the engine thread and what it is told. Plain values; the only border between the two.

Commands enter a bounded queue and take effect at the next step border, in order. Events leave as one batch per step.
A sequence is named by its AttemptKey. This module is pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.ids import AttemptKey
from common.types import FinishReason, SamplingParams, StopConditions, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """A sequence to compute. `token_ids` = prompt + tokens emitted by earlier attempts; never empty.

    The next sampled token has index `len(token_ids) - num_prompt_tokens`. `cache_salt` separates tenants in the prefix
    cache. Raises nothing: the services validate before they build one.

    `num_logprobs` and `num_prompt_logprobs`: alternatives to report with each token of completion and prompt, None reports nothing.
    """

    key: AttemptKey
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopConditions
    cache_salt: bytes = b""
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


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
    """The KV of a reserved sequence has arrived: `first_token_id` is its next known token, join the running batch.

    The token at the next index was sampled by prefill; the engine applies stop conditions to it but never reports it as new.
    """

    key: AttemptKey
    first_token_id: int


@dataclass(frozen=True, slots=True)
class ReleaseHandoff:
    """Drop the `handoff` Hold of a prefill-only sequence (acknowledged, refused or settled)."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Abort:
    """End the sequence at the next step border and free what it holds, except blocks under a handoff Hold. Idempotent.

    For a reserved sequence the caller first settles the transfer: after this command its blocks may be reused.
    """

    key: AttemptKey
    reason: str


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

    `num_cached_tokens` is the prefix hit at its first scheduling; `scheduled_s` the time of its first step.
    """

    key: AttemptKey
    reason: FinishReason
    num_tokens: int
    num_cached_tokens: int
    num_chunks: int
    scheduled_s: float


Event = Reserved | Refused | ChunkComputed | Sampled | PromptLogprobs | SequenceEnded


@dataclass(frozen=True, slots=True)
class StepEvents:
    """All that one step (or one command without a step) produced, in order. `now` is when the step's results were known."""

    now: float
    events: tuple[Event, ...]
