from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Attempt(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("max_new_tokens", "min_new_tokens", "stop_token_ids", "ignore_eos")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class SequenceSpec(_message.Message):
    __slots__ = ("token_ids", "num_prompt_tokens", "sampling", "stop", "cache_salt", "deadline_s", "logprobs", "prompt_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: Sampling
    stop: Stop
    cache_salt: bytes
    deadline_s: float
    logprobs: int
    prompt_logprobs: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., deadline_s: _Optional[float] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    version: str
    def __init__(self, router_id: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("attempt", "sequence", "handoff_id")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    sequence: SequenceSpec
    handoff_id: str
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., sequence: _Optional[_Union[SequenceSpec, _Mapping]] = ..., handoff_id: _Optional[str] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("attempt", "sequence", "handoff_id", "prefill_worker_id", "prefill_incarnation", "prefill_kv_address")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    sequence: SequenceSpec
    handoff_id: str
    prefill_worker_id: str
    prefill_incarnation: str
    prefill_kv_address: str
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., sequence: _Optional[_Union[SequenceSpec, _Mapping]] = ..., handoff_id: _Optional[str] = ..., prefill_worker_id: _Optional[str] = ..., prefill_incarnation: _Optional[str] = ..., prefill_kv_address: _Optional[str] = ...) -> None: ...

class Generate(_message.Message):
    __slots__ = ("attempt", "sequence")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    sequence: SequenceSpec
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., sequence: _Optional[_Union[SequenceSpec, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("attempt", "reason")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    reason: str
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("hello", "prefill", "reserve", "generate", "abort")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    prefill: Prefill
    reserve: Reserve
    generate: Generate
    abort: Abort
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., generate: _Optional[_Union[Generate, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("num_cached_tokens", "num_blocks")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    num_blocks: int
    def __init__(self, num_cached_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class PrefillTimeline(_message.Message):
    __slots__ = ("received_s", "scheduled_s", "computed_s", "first_token_s", "num_cached_tokens", "num_chunks")
    RECEIVED_S_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    received_s: float
    scheduled_s: float
    computed_s: float
    first_token_s: float
    num_cached_tokens: int
    num_chunks: int
    def __init__(self, received_s: _Optional[float] = ..., scheduled_s: _Optional[float] = ..., computed_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ..., num_chunks: _Optional[int] = ...) -> None: ...

class HandoffTimeline(_message.Message):
    __slots__ = ("reserved_s", "opened_s", "first_frame_s", "last_announced_s", "last_frame_s", "committed_s", "first_decode_s", "num_frames", "num_bytes", "num_blocks", "num_cached_tokens", "transfer_s", "scatter_s", "transport")
    RESERVED_S_FIELD_NUMBER: _ClassVar[int]
    OPENED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_FRAME_S_FIELD_NUMBER: _ClassVar[int]
    LAST_ANNOUNCED_S_FIELD_NUMBER: _ClassVar[int]
    LAST_FRAME_S_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_DECODE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    SCATTER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    reserved_s: float
    opened_s: float
    first_frame_s: float
    last_announced_s: float
    last_frame_s: float
    committed_s: float
    first_decode_s: float
    num_frames: int
    num_bytes: int
    num_blocks: int
    num_cached_tokens: int
    transfer_s: float
    scatter_s: float
    transport: str
    def __init__(self, reserved_s: _Optional[float] = ..., opened_s: _Optional[float] = ..., first_frame_s: _Optional[float] = ..., last_announced_s: _Optional[float] = ..., last_frame_s: _Optional[float] = ..., committed_s: _Optional[float] = ..., first_decode_s: _Optional[float] = ..., num_frames: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., transfer_s: _Optional[float] = ..., scatter_s: _Optional[float] = ..., transport: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("first_index", "token_ids", "logprobs")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_position", "logprobs")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, first_position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "num_tokens", "prefill", "handoff")
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    reason: str
    num_tokens: int
    prefill: PrefillTimeline
    handoff: HandoffTimeline
    def __init__(self, reason: _Optional[str] = ..., num_tokens: _Optional[int] = ..., prefill: _Optional[_Union[PrefillTimeline, _Mapping]] = ..., handoff: _Optional[_Union[HandoffTimeline, _Mapping]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("kind", "message", "retry_after_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    retry_after_s: float
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("attempt", "reserved", "tokens", "finished", "failed", "prefilled", "handed_over", "prompt_logprobs")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    reserved: Reserved
    tokens: Tokens
    finished: Finished
    failed: Failed
    prefilled: PrefillTimeline
    handed_over: HandoffTimeline
    prompt_logprobs: PromptLogprobs
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., prefilled: _Optional[_Union[PrefillTimeline, _Mapping]] = ..., handed_over: _Optional[_Union[HandoffTimeline, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class Events(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "state", "kv_address", "kv_scheme", "model", "kv_fingerprint", "block_size", "num_blocks", "max_sequence_tokens", "dtype", "version", "census")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_SCHEME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CENSUS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: str
    state: str
    kv_address: str
    kv_scheme: str
    model: str
    kv_fingerprint: str
    block_size: int
    num_blocks: int
    max_sequence_tokens: int
    dtype: str
    version: str
    census: Census
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., kv_address: _Optional[str] = ..., kv_scheme: _Optional[str] = ..., model: _Optional[str] = ..., kv_fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., version: _Optional[str] = ..., census: _Optional[_Union[Census, _Mapping]] = ...) -> None: ...

class Census(_message.Message):
    __slots__ = ("total", "free", "cached", "held", "held_by")
    class HeldByEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    held: int
    held_by: _containers.ScalarMap[str, int]
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., held: _Optional[int] = ..., held_by: _Optional[_Mapping[str, int]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("remaining",)
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    remaining: int
    def __init__(self, remaining: _Optional[int] = ...) -> None: ...
