"""Every value survives the way over the wire, and no field is forgotten on either side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from common.rpc import convert
from common.rpc import serving_pb2 as pb
from common.types import BlockCensus, HandoffTimeline, PrefillTimeline, SamplingParams, StopConditions

UINT32 = st.integers(0, 2**32 - 1)
SECONDS = st.floats(0, allow_nan=False)

SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=UINT32,
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    choice=UINT32,
)
STOP = st.builds(
    StopConditions,
    max_new_tokens=UINT32,
    min_new_tokens=UINT32,
    stop_token_ids=st.lists(UINT32).map(tuple),
    ignore_eos=st.booleans(),
)
PREFILL = st.builds(PrefillTimeline, SECONDS, SECONDS, SECONDS, SECONDS, UINT32, UINT32)
HANDOFF = st.builds(
    HandoffTimeline,
    **{name: SECONDS for name in HandoffTimeline.__dataclass_fields__ if name.endswith("_s")},
    num_frames=UINT32,
    num_bytes=st.integers(0, 2**64 - 1),
    num_blocks=UINT32,
    num_cached_tokens=UINT32,
    transport=st.text(st.characters(exclude_categories=["Cs"])),
)
CENSUS = st.builds(
    BlockCensus,
    UINT32,
    UINT32,
    UINT32,
    UINT32,
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), UINT32),
)


@given(value=SAMPLING)
def test_sampling_survives(value: SamplingParams) -> None:
    assert convert.sampling_from_pb(pb.Sampling.FromString(convert.sampling_to_pb(value).SerializeToString())) == value


@given(value=STOP)
def test_stop_conditions_survive(value: StopConditions) -> None:
    assert convert.stop_from_pb(pb.Stop.FromString(convert.stop_to_pb(value).SerializeToString())) == value


@given(value=PREFILL)
def test_a_prefill_timeline_survives(value: PrefillTimeline) -> None:
    wire = convert.prefill_timeline_to_pb(value).SerializeToString()
    assert convert.prefill_timeline_from_pb(pb.PrefillTimeline.FromString(wire)) == value


@given(value=HANDOFF)
def test_a_handoff_timeline_survives(value: HandoffTimeline) -> None:
    wire = convert.handoff_timeline_to_pb(value).SerializeToString()
    assert convert.handoff_timeline_from_pb(pb.HandoffTimeline.FromString(wire)) == value


@given(value=CENSUS)
def test_a_census_survives(value: BlockCensus) -> None:
    assert convert.census_from_pb(pb.Census.FromString(convert.census_to_pb(value).SerializeToString())) == value


@pytest.mark.parametrize(
    ("value_type", "message_type"),
    [
        (SamplingParams, pb.Sampling),
        (StopConditions, pb.Stop),
        (PrefillTimeline, pb.PrefillTimeline),
        (HandoffTimeline, pb.HandoffTimeline),
        (BlockCensus, pb.Census),
    ],
)
def test_both_sides_have_the_same_fields(value_type: Any, message_type: type[Message]) -> None:
    assert {field.name for field in fields(value_type)} == {field.name for field in message_type.DESCRIPTOR.fields}


@pytest.mark.parametrize(("seed", "on_the_wire"), [(-1, 2**64 - 1), (2**64, 0), (-(2**63), 2**63)])
def test_a_seed_outside_64_bits_is_taken_modulo(seed: int, on_the_wire: int) -> None:
    assert convert.sampling_to_pb(SamplingParams(seed=seed)).seed == on_the_wire


@pytest.mark.parametrize(
    "make",
    [lambda: convert.stop_to_pb(StopConditions(max_new_tokens=-1)), lambda: convert.sampling_to_pb(SamplingParams(top_k=-1))],
)
def test_a_negative_count_is_an_error_and_not_a_huge_number(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="-1"):
        make()
