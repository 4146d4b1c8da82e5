"""The router's end of the Session messages: plain values to protobuf commands, protobuf events to plain values.

The only module of the router that touches generated code besides `clients`. Integers from the wire are bounded by their protobuf
types; a message of a kind this version does not know is reported as None and counted by the caller.
"""

from __future__ import annotations

from common.errors import error_from_kind
from common.ids import AttemptKey, HandoffId, RequestId
from common.rpc import convert
from common.rpc import serving_pb2 as pb
from common.types import SamplingParams, StopConditions, WorkerInfo
from router.events import Failed, Finished, HandedOver, LegEvent, Prefilled, PromptRated, Reserved, Tokens


def sequence_spec(
    token_ids: list[int],
    num_prompt_tokens: int,
    sampling: SamplingParams,
    stop: StopConditions,
    deadline_s: float,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    cache_salt: bytes,
) -> pb.SequenceSpec:
    return pb.SequenceSpec(
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        sampling=convert.sampling_to_pb(sampling),
        stop=convert.stop_to_pb(stop),
        deadline_s=deadline_s,
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
        cache_salt=cache_salt,
    )


def hello(router_id: str, version: str) -> pb.Command:
    return pb.Command(hello=pb.Hello(router_id=router_id, version=version))


def prefill(key: AttemptKey, spec: pb.SequenceSpec, handoff_id: HandoffId) -> pb.Command:
    return pb.Command(prefill=pb.Prefill(attempt=_attempt(key), sequence=spec, handoff_id=handoff_id))


def reserve(key: AttemptKey, spec: pb.SequenceSpec, handoff_id: HandoffId, prefill_worker: WorkerInfo) -> pb.Command:
    """Where the KV comes from is taken from the registry only, never from a client."""
    return pb.Command(
        reserve=pb.Reserve(
            attempt=_attempt(key),
            sequence=spec,
            handoff_id=handoff_id,
            prefill_worker_id=prefill_worker.worker_id,
            prefill_incarnation=prefill_worker.incarnation,
            prefill_kv_address=prefill_worker.kv_address,
        )
    )


def generate(key: AttemptKey, spec: pb.SequenceSpec) -> pb.Command:
    return pb.Command(generate=pb.Generate(attempt=_attempt(key), sequence=spec))


def abort(key: AttemptKey, reason: str) -> pb.Command:
    return pb.Command(abort=pb.Abort(attempt=_attempt(key), reason=reason))


def attempt_key(attempt: pb.Attempt) -> AttemptKey:
    return AttemptKey(RequestId(attempt.request_id), attempt.epoch)


def leg_event(event: pb.Event) -> LegEvent | None:
    """The plain value of one event, or None for a kind this version does not know."""
    kind = event.WhichOneof("event")
    if kind == "tokens":
        tokens = event.tokens
        logprobs = tuple(map(convert.logprobs_from_pb, tokens.logprobs)) if tokens.logprobs else ()
        return Tokens(tokens.first_index, tuple(tokens.token_ids), logprobs)
    if kind == "prompt_logprobs":
        return PromptRated(
            event.prompt_logprobs.first_position, tuple(map(convert.logprobs_from_pb, event.prompt_logprobs.logprobs))
        )
    if kind == "reserved":
        return Reserved(event.reserved.num_cached_tokens, event.reserved.num_blocks)
    if kind == "prefilled":
        return Prefilled(convert.prefill_timeline_from_pb(event.prefilled))
    if kind == "handed_over":
        return HandedOver(convert.handoff_timeline_from_pb(event.handed_over))
    if kind == "finished":
        message = event.finished
        return Finished(
            reason=message.reason,
            num_tokens=message.num_tokens,
            prefill=convert.prefill_timeline_from_pb(message.prefill) if message.HasField("prefill") else None,
            handoff=convert.handoff_timeline_from_pb(message.handoff) if message.HasField("handoff") else None,
        )
    if kind == "failed":
        return Failed(error_from_kind(event.failed.kind, event.failed.message, event.failed.retry_after_s or None))
    return None


def _attempt(key: AttemptKey) -> pb.Attempt:
    return pb.Attempt(request_id=key.request_id, epoch=key.epoch)
