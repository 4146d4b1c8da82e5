"""What a worker tells about one leg of an attempt, as plain values: the router's side of the wire's Event message.

After Finished or Failed a leg says nothing more. Times inside the timelines are monotonic seconds of the worker's host, so only their
differences mean anything here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.errors import BatonError
from common.types import HandoffTimeline, PrefillTimeline, TokenLogprobs


class LegRole(Enum):
    """What a leg does for its attempt; LOCAL computes the prompt and generates."""

    PREFILL = "prefill"
    DECODE = "decode"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Reserved:
    num_cached_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens; `logprobs` has one entry per token when they were asked for."""

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptRated:
    """Logprobs of the prompt tokens at positions `first_position`, +1, ..."""

    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Prefilled:
    timeline: PrefillTimeline


@dataclass(frozen=True, slots=True)
class HandedOver:
    timeline: HandoffTimeline


@dataclass(frozen=True, slots=True)
class Finished:
    """`reason` is stop, length, abort, or handed_over (prefill legs only)."""

    reason: str
    num_tokens: int
    prefill: PrefillTimeline | None
    handoff: HandoffTimeline | None


@dataclass(frozen=True, slots=True)
class Failed:
    error: BatonError


LegEvent = Reserved | Tokens | PromptRated | Prefilled | HandedOver | Finished | Failed
