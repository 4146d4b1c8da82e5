"""Value types that cross module borders: sampling parameters, finish reasons, worker descriptions, timelines.

Everything here is a frozen, slotted dataclass or an enum; nothing here does I/O or knows torch. Times are monotonic
seconds of the host that recorded them unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from common.ids import Incarnation, WorkerId


class Role(Enum):
    """What a worker is for. Roles differ in settings only: the engine underneath is the same."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(Enum):
    """Why a completion ended. STOP and LENGTH are OpenAI's words; ABORT never reaches a client as a success."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class WorkerState(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Validated by the router; workers trust it.

    `temperature` 0 means greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch the filter off. `seed` is always set (the
    router draws one when the client gave none), so that a retried attempt samples the same tokens: the noise of a token
    is a pure function of (seed, choice, token index). `choice` is the index of the completion among n.

    Before that, in this order: `repetition_penalty` (1 = off) divides positive and multiplies negative logits of every token of
    prompt and completion; `frequency_penalty` × count and `presence_penalty` are subtracted for tokens of the completion;
    `logit_bias` (token id, added value) is added. All are functions of the known tokens, so no state travels.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found one token: natural logarithms of its plain distribution, before temperature, penalties and filters.

    `logprob` is that of the token itself; `top` are the most likely (token id, logprob), most likely first and the lower id first of
    equals, as many as were asked for; the token itself need not be among them.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a sequence ends, as far as token ids can tell; stop strings are matched by the router.

    `max_new_tokens` counts completion tokens from index 0 of the request, tokens emitted by earlier attempts included.
    `min_new_tokens` forbids stop tokens before that many completion tokens exist. A stop token ends the sequence and is
    reported (the router leaves it out of the text).
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class BlockCensus:
    """Where the blocks of one worker's pool are, right now. free + cached + held = total, always.

    *free* blocks carry no content, *cached* ones are unheld but keep their prefix-cache content (also available),
    *held* ones have at least one Hold. `held_by` counts held blocks per owner label (a shared block counts for each).
    """

    total: int
    free: int
    cached: int
    held: int
    held_by: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What placement needs to know of a worker; published with each heartbeat."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_blocks_available: int = 0
    num_handoffs: int = 0


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What one engine has done since its start. Every token that was computed is either a prompt token or a decode token.

    *Decode tokens* were the only one that their sequence lacked; *prompt tokens* came in chunks, recompute after a preemption
    included. *Prefix-hit tokens* needed no computing, because the prefix cache had their KV.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker registers. `kv_fingerprint` must be equal on both ends of a handoff.

    `grpc_address` and `kv_address` are host:port. `kv_scheme` is the data plane (ucx, tcp). `max_sequence_tokens` is the
    longest prompt + completion that fits the model and the worker's pool.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    state: WorkerState
    grpc_address: str
    kv_address: str
    kv_scheme: str
    model: str
    kv_fingerprint: str
    block_size: int
    num_blocks: int
    max_sequence_tokens: int
    dtype: str
    pid: int
    version: str
    load: WorkerLoad = field(default_factory=WorkerLoad)


@dataclass(frozen=True, slots=True)
class PrefillTimeline:
    """Stages on the prefill worker, host monotonic seconds (0.0 = did not happen)."""

    received_s: float = 0.0
    scheduled_s: float = 0.0
    computed_s: float = 0.0
    first_token_s: float = 0.0
    num_cached_tokens: int = 0
    num_chunks: int = 0


@dataclass(frozen=True, slots=True)
class HandoffTimeline:
    """Stages of one handoff as the decode worker saw them, host monotonic seconds (0.0 = did not happen).

    `transfer_s` is the sum of the time the data plane spent moving bytes, `scatter_s` that of copying and verifying.
    """

    reserved_s: float = 0.0
    opened_s: float = 0.0
    first_frame_s: float = 0.0
    last_announced_s: float = 0.0
    last_frame_s: float = 0.0
    committed_s: float = 0.0
    first_decode_s: float = 0.0
    num_frames: int = 0
    num_bytes: int = 0
    num_blocks: int = 0
    num_cached_tokens: int = 0
    transfer_s: float = 0.0
    scatter_s: float = 0.0
    transport: str = ""
