"""Between the messages of serving.proto and the common value types. One pair of functions per type, nothing else.

The engine's own types stay out (common must not know the engine); the services build those from what comes out of here.
"""

from __future__ import annotations

from common.rpc import serving_pb2 as pb
from common.types import BlockCensus, HandoffTimeline, PrefillTimeline, SamplingParams, StopConditions, TokenLogprobs


def sampling_to_pb(sampling: SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed & 0xFFFF_FFFF_FFFF_FFFF,
        choice=sampling.choice,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
    )


def sampling_from_pb(message: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        choice=message.choice,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
    )


def logprobs_to_pb(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    top = logprobs.top
    return pb.TokenLogprobs(logprob=logprobs.logprob, top_ids=[i for i, _ in top], top_logprobs=[value for _, value in top])


def logprobs_from_pb(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple(zip(message.top_ids, message.top_logprobs, strict=True)))


def stop_to_pb(stop: StopConditions) -> pb.Stop:
    return pb.Stop(
        max_new_tokens=stop.max_new_tokens,
        min_new_tokens=stop.min_new_tokens,
        stop_token_ids=stop.stop_token_ids,
        ignore_eos=stop.ignore_eos,
    )


def stop_from_pb(message: pb.Stop) -> StopConditions:
    return StopConditions(
        max_new_tokens=message.max_new_tokens,
        min_new_tokens=message.min_new_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def prefill_timeline_to_pb(timeline: PrefillTimeline) -> pb.PrefillTimeline:
    return pb.PrefillTimeline(
        received_s=timeline.received_s,
        scheduled_s=timeline.scheduled_s,
        computed_s=timeline.computed_s,
        first_token_s=timeline.first_token_s,
        num_cached_tokens=timeline.num_cached_tokens,
        num_chunks=timeline.num_chunks,
    )


def prefill_timeline_from_pb(message: pb.PrefillTimeline) -> PrefillTimeline:
    return PrefillTimeline(
        received_s=message.received_s,
        scheduled_s=message.scheduled_s,
        computed_s=message.computed_s,
        first_token_s=message.first_token_s,
        num_cached_tokens=message.num_cached_tokens,
        num_chunks=message.num_chunks,
    )


_HANDOFF_FIELDS = tuple(HandoffTimeline.__dataclass_fields__)


def handoff_timeline_to_pb(timeline: HandoffTimeline) -> pb.HandoffTimeline:
    return pb.HandoffTimeline(**{name: getattr(timeline, name) for name in _HANDOFF_FIELDS})


def handoff_timeline_from_pb(message: pb.HandoffTimeline) -> HandoffTimeline:
    return HandoffTimeline(**{name: getattr(message, name) for name in _HANDOFF_FIELDS})


def census_to_pb(census: BlockCensus) -> pb.Census:
    return pb.Census(total=census.total, free=census.free, cached=census.cached, held=census.held, held_by=census.held_by)


def census_from_pb(message: pb.Census) -> BlockCensus:
    return BlockCensus(message.total, message.free, message.cached, message.held, dict(message.held_by))
