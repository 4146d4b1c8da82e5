"""Which workers serve an attempt: a prefill and a decode worker, or a decode worker alone, with the reason in words.

Pure: takes the candidates the fleet offers and numbers of their load, returns a Placement or raises NoWorker, Overloaded. Knows no
sockets, no store and no time; loads are counts of requests and tokens, the rotation only breaks ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from common.errors import NoWorker, Overloaded
from common.types import WorkerInfo


class Mode(Enum):
    """DISAGGREGATED: both legs. LOCAL: decode computes the prompt too. PREFILL_ONLY: one token is left, no decode leg."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"
    PREFILL_ONLY = "prefill_only"


WorkerKey = tuple[str, str]
"""(worker id, incarnation): a restarted worker is another one."""


def worker_key(info: WorkerInfo) -> WorkerKey:
    return (info.worker_id, info.incarnation)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A usable worker: its registered load, and what this router itself has on it right now.

    `num_requests` counts legs in flight; `num_queued_tokens` tokens of legs whose first token has not been seen.
    """

    info: WorkerInfo
    num_requests: int = 0
    num_queued_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """What an attempt needs. `num_known_tokens` = prompt + tokens emitted by earlier attempts."""

    num_known_tokens: int
    num_tokens_max: int

    @property
    def num_tokens_left(self) -> int:
        return self.num_tokens_max - self.num_known_tokens


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """`local_prompt_tokens_max`: prompts up to here run on decode alone. `local_prefill_tokens_max`: the most tokens of
    prompts that may be queued for local prefill on one decode worker, so that it can never swamp decoding (one prompt is
    always allowed on a worker that has none)."""

    local_prompt_tokens_max: int
    local_prefill_tokens_max: int


@dataclass(frozen=True, slots=True)
class Exclusions:
    """What earlier attempts of the same request taught. `failed` workers are never used again, `busy` ones refused,
    `suspect` ones took part in a failed handoff and come last. `must_be_local` after repeated handoff failures."""

    failed: frozenset[WorkerKey] = field(default_factory=frozenset)
    busy: frozenset[WorkerKey] = field(default_factory=frozenset)
    suspect: frozenset[WorkerKey] = field(default_factory=frozenset)
    must_be_local: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """`local_because` is a short constant for the metric when mode is LOCAL (else empty)."""

    mode: Mode
    prefill: WorkerInfo | None
    decode: WorkerInfo | None
    reason: str
    local_because: str = ""


def place(
    demand: Demand,
    prefill: Sequence[Candidate],
    decode: Sequence[Candidate],
    policy: PlacementPolicy,
    exclusions: Exclusions,
    rotation: int,
) -> Placement:
    """Chooses the least loaded workers that can hold the request.

    Raises NoWorker when no decode worker is usable, Overloaded when all usable ones refused already or local prefill is
    over its budget.
    """
    decodes = _usable(decode, exclusions, demand.num_tokens_max, "decode")
    decodes = _best_first(decodes, _decode_load, exclusions, rotation, demand.num_known_tokens)
    prefills, no_prefill_because = _prefill_candidates(prefill, decodes, demand, exclusions, rotation)

    if demand.num_known_tokens <= policy.local_prompt_tokens_max:
        local = _local(
            demand,
            decodes,
            policy,
            "short_prompt",
            f"prompt of {demand.num_known_tokens} tokens is at most {policy.local_prompt_tokens_max}",
        )
        if local is not None:
            return local
    if exclusions.must_be_local or not prefills:
        because = "handoff_failures" if exclusions.must_be_local else no_prefill_because
        if because == "prefill_busy":
            raise Overloaded("every prefill worker refused the request for lack of room", retry_after_s=1.0)
        local = _local(demand, decodes, policy, because, because.replace("_", " "))
        if local is None:
            raise Overloaded(
                f"local prefill of {demand.num_known_tokens} tokens is over the budget of "
                f"{policy.local_prefill_tokens_max} on every decode worker",
                retry_after_s=1.0,
            )
        return local

    chosen_prefill = prefills[0]
    prefill_words = (
        f"prefill {chosen_prefill.info.worker_id} ({_prefill_load(chosen_prefill)} tokens queued, least of {len(prefills)})"
    )
    if demand.num_tokens_left <= 1:
        return Placement(Mode.PREFILL_ONLY, chosen_prefill.info, None, f"one token is left: {prefill_words} alone")
    partners = [d for d in decodes if d.info.kv_fingerprint == chosen_prefill.info.kv_fingerprint]
    chosen_decode = partners[0]
    reason = f"{prefill_words}, decode {chosen_decode.info.worker_id} ({_decode_load(chosen_decode)} sequences, least of {len(partners)})"
    return Placement(Mode.DISAGGREGATED, chosen_prefill.info, chosen_decode.info, reason)


def _usable(candidates: Sequence[Candidate], exclusions: Exclusions, num_tokens: int, role: str) -> list[Candidate]:
    """Candidates not excluded and long enough; explains an empty result."""
    if not candidates:
        raise NoWorker(f"no {role} worker is ready", retry_after_s=1.0)
    healthy = [c for c in candidates if worker_key(c.info) not in exclusions.failed]
    if not healthy:
        raise NoWorker(f"all {len(candidates)} {role} workers failed this request", retry_after_s=1.0)
    fitting = [c for c in healthy if c.info.max_sequence_tokens >= num_tokens]
    if not fitting:
        longest = max(c.info.max_sequence_tokens for c in healthy)
        raise NoWorker(
            f"no {role} worker is ready that can hold {num_tokens} tokens (the largest holds {longest})", retry_after_s=1.0
        )
    free = [c for c in fitting if worker_key(c.info) not in exclusions.busy]
    if not free:
        raise Overloaded(f"all {len(fitting)} usable {role} workers refused the request for lack of room", retry_after_s=1.0)
    return free


def _prefill_candidates(
    prefill: Sequence[Candidate], decodes: Sequence[Candidate], demand: Demand, exclusions: Exclusions, rotation: int
) -> tuple[list[Candidate], str]:
    """Prefill workers that can serve some usable decode worker, best first, or the reason why there is none."""
    fingerprints = {d.info.kv_fingerprint for d in decodes}
    healthy = [
        c
        for c in prefill
        if worker_key(c.info) not in exclusions.failed
        and c.info.kv_fingerprint in fingerprints
        and c.info.max_sequence_tokens > demand.num_known_tokens
    ]
    free = [c for c in healthy if worker_key(c.info) not in exclusions.busy]
    if free:
        return _best_first(free, _prefill_load, exclusions, rotation, 0), ""
    return [], "prefill_busy" if healthy else "no_prefill_worker"


def _local(demand: Demand, decodes: Sequence[Candidate], policy: PlacementPolicy, because: str, words: str) -> Placement | None:
    """The best decode worker within the local prefill budget, or None."""
    for candidate in decodes:
        queued = candidate.num_queued_tokens
        if queued == 0 or queued + demand.num_known_tokens <= policy.local_prefill_tokens_max:
            load = f"{_decode_load(candidate)} sequences, {queued} local prefill tokens"
            reason = f"local on decode {candidate.info.worker_id} ({load}): {words}"
            return Placement(Mode.LOCAL, None, candidate.info, reason, because)
    return None


def _decode_load(candidate: Candidate) -> int:
    """Sequences on the worker: what it published (all routers, a heartbeat old) or what we have there (ours, exact), if more."""
    load = candidate.info.load
    return max(load.num_running + load.num_waiting + load.num_handoffs, candidate.num_requests)


def _prefill_load(candidate: Candidate) -> int:
    """Prompt tokens not computed yet, published or ours, if more."""
    return max(candidate.info.load.num_waiting_tokens, candidate.num_queued_tokens)


def _best_first(
    candidates: Sequence[Candidate],
    load: Callable[[Candidate], int],
    exclusions: Exclusions,
    rotation: int,
    num_tokens_needed: int,
) -> list[Candidate]:
    """Not suspect first, then those with room for the blocks now, then least load; equal ones take turns."""
    ordered = sorted(candidates, key=lambda c: c.info.worker_id)
    turn = rotation % len(ordered) if ordered else 0
    ordered = ordered[turn:] + ordered[:turn]

    def rank(candidate: Candidate) -> tuple[bool, bool, int]:
        info = candidate.info
        lacks_room = info.load.num_blocks_available * info.block_size < num_tokens_needed
        return (worker_key(info) in exclusions.suspect, lacks_room, load(candidate))

    return sorted(ordered, key=rank)
