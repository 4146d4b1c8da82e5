"""From a wire SequenceSpec to the engine's: every integer that came over the network is checked here, once.

A worker trusts its routers with meaning (sampling values are validated there), never with memory: lengths, ids and token
numbers are bounded before anything is allocated for them.
"""

from __future__ import annotations

from common.errors import InvalidRequest
from common.ids import ID_LENGTH_MAX
from common.rpc import convert
from common.rpc import serving_pb2 as pb
from engine.commands import SequenceSpec
from engine.serving.session import attempt_key

EPOCH_MAX = (1 << 63) - 1
ADDRESS_LENGTH_MAX = 261
"""A DNS name of 255 characters, a colon and a port."""
STOP_TOKENS_MAX = 128
SALT_BYTES_MAX = 64
LOGPROBS_MAX = 20
LOGIT_BIAS_MAX = 1024


def parse_attempt(attempt: pb.Attempt) -> None:
    """Raises InvalidRequest for an attempt that no router of ours would send."""
    if not 0 < len(attempt.request_id) <= ID_LENGTH_MAX:
        raise InvalidRequest(
            f"request_id has {len(attempt.request_id)} characters, 1 to {ID_LENGTH_MAX} are allowed", param="request_id"
        )
    if not 1 <= attempt.epoch <= EPOCH_MAX:
        raise InvalidRequest(f"epoch is {attempt.epoch}, 1 to {EPOCH_MAX} are allowed", param="epoch")


def parse_handoff_id(handoff_id: str) -> str:
    if not 0 < len(handoff_id) <= ID_LENGTH_MAX:
        raise InvalidRequest(f"handoff_id has {len(handoff_id)} characters, 1 to {ID_LENGTH_MAX} are allowed", param="handoff_id")
    return handoff_id


def is_nameable(attempt: pb.Attempt, handoff_id: str) -> bool:
    """Whether the fabric can speak of this attempt at all: a refused command may be refused for just that."""
    try:
        parse_attempt(attempt)
        parse_handoff_id(handoff_id)
    except InvalidRequest:
        return False
    return True


def parse_reserve(reserve: pb.Reserve) -> None:
    """Raises InvalidRequest unless the handoff and its prefill worker are named in the form that the fabric takes."""
    parse_handoff_id(reserve.handoff_id)
    for param in ("prefill_worker_id", "prefill_incarnation"):
        length = len(getattr(reserve, param))
        if not 0 < length < ID_LENGTH_MAX:
            raise InvalidRequest(f"{param} has {length} characters, 1 to {ID_LENGTH_MAX - 1} are allowed", param=param)
    address = reserve.prefill_kv_address
    host, _, port = address.rpartition(":")
    if not host or len(address) > ADDRESS_LENGTH_MAX or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidRequest(f"prefill_kv_address is no host:port: {address[:100]!r}", param="prefill_kv_address")


def parse_sequence(attempt: pb.Attempt, message: pb.SequenceSpec, *, vocab_size: int, max_sequence_tokens: int) -> SequenceSpec:
    """The engine's spec of a wire message. Raises InvalidRequest naming the field and the limit."""
    parse_attempt(attempt)
    num_tokens = len(message.token_ids)
    if not 0 < num_tokens < max_sequence_tokens:
        raise InvalidRequest(
            f"token_ids has {num_tokens} tokens; this worker takes 1 to {max_sequence_tokens - 1} and room for one more",
            param="token_ids",
        )
    if not 0 < message.num_prompt_tokens <= num_tokens:
        raise InvalidRequest(
            f"num_prompt_tokens is {message.num_prompt_tokens}, token_ids has {num_tokens}", param="num_prompt_tokens"
        )
    largest = max(message.token_ids)
    if largest >= vocab_size:
        raise InvalidRequest(f"token id {largest} is outside the vocabulary of {vocab_size}", param="token_ids")
    if len(message.stop.stop_token_ids) > STOP_TOKENS_MAX:
        raise InvalidRequest(f"{len(message.stop.stop_token_ids)} stop tokens, at most {STOP_TOKENS_MAX}", param="stop_token_ids")
    if len(message.cache_salt) > SALT_BYTES_MAX:
        raise InvalidRequest(f"cache_salt has {len(message.cache_salt)} bytes, at most {SALT_BYTES_MAX}", param="cache_salt")
    _check_options(message, vocab_size)
    num_emitted = num_tokens - message.num_prompt_tokens
    if message.stop.max_new_tokens <= num_emitted:
        raise InvalidRequest(
            f"max_new_tokens is {message.stop.max_new_tokens}, but {num_emitted} completion tokens exist already",
            param="max_new_tokens",
        )
    return SequenceSpec(
        key=attempt_key(attempt),
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=convert.sampling_from_pb(message.sampling),
        stop=convert.stop_from_pb(message.stop),
        cache_salt=message.cache_salt,
        num_logprobs=message.logprobs if message.HasField("logprobs") else None,
        num_prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def _check_options(message: pb.SequenceSpec, vocab_size: int) -> None:
    """What changes logits or asks for more than tokens."""
    bias = message.sampling.logit_bias
    if len(bias) > LOGIT_BIAS_MAX:
        raise InvalidRequest(f"logit_bias has {len(bias)} entries, at most {LOGIT_BIAS_MAX}", param="logit_bias")
    if bias and (largest := max(entry.token_id for entry in bias)) >= vocab_size:
        raise InvalidRequest(f"logit_bias: token id {largest} is outside the vocabulary of {vocab_size}", param="logit_bias")
    if message.logprobs > LOGPROBS_MAX:
        raise InvalidRequest(f"logprobs is {message.logprobs}, at most {LOGPROBS_MAX}", param="logprobs")
    if message.prompt_logprobs > LOGPROBS_MAX:
        raise InvalidRequest(f"prompt_logprobs is {message.prompt_logprobs}, at most {LOGPROBS_MAX}", param="prompt_logprobs")
