"""Decides what each step computes: commands change the sequences, `schedule` picks tokens, `apply` takes in the results.

There are no phases. Each sequence has computed tokens that catch up with its known tokens under a token budget; prompt chunks,
prefix hits, decodes and recompute after preemption are that one rule. Pure and single-threaded: it takes `now` (monotonic
seconds), returns batches and events, and must not know devices, threads or the network. A step costs O(running sequences + scheduled
tokens) of plain counting, whatever their contexts; taking, admitting and ending a sequence costs O(its blocks), whoever else is there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from common.errors import BatonError, InvalidRequest, Overloaded
from common.ids import AttemptKey
from common.types import BlockCensus, EngineCounts, FinishReason, WorkerLoad
from engine import commands
from engine.batch import StepBatch, StepResults
from engine.block_allocator import BlockAllocator
from engine.commands import ChunkComputed, Command, Event, PromptLogprobs, Refused, Reserved, Sampled, SequenceEnded, SequenceSpec
from engine.intake import check_size, check_spec
from engine.prefix_index import PrefixIndex
from engine.prompt_shares import share_out
from engine.sequence import Kind, Sequence, State, arrival_of, finish_reason, handoff_owner
from engine.sequence_blocks import SequenceBlocks
from engine.step_builder import StepBuilder
from engine.waiting_line import WaitingLine

RATED_CHUNK_MAX = 128
"""Prompt tokens of one sequence in a step whose logprobs are wanted: each takes a row of logits over the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Bounds of one engine.

    A step computes at most `token_budget` tokens, of which at most `prefill_tokens_max` belong to prompt chunks, and at most
    `prefill_tokens_beside_max` (None: the same) if any sequence decodes in that step: its next token waits for the chunks. At most
    `max_sequences` sequences run or are reserved, at most `waiting_max` new ones wait. Admission leaves each active sequence
    `growth_blocks` blocks to grow into before anyone is preempted. Up to `prompts_at_once` prompts are computed side by side even when
    one alone would fill the steps: more let short ones pass long ones sooner and hold blocks longer. `retry_after_s` is the hint
    of a refusal for overload.
    """

    block_size: int
    token_budget: int
    prefill_tokens_max: int
    max_sequences: int
    max_sequence_tokens: int
    waiting_max: int
    growth_blocks: int = 1
    prompts_at_once: int = 4
    prefill_tokens_beside_max: int | None = None
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("block_size", "token_budget", "prefill_tokens_max", "max_sequences", "waiting_max", "prompts_at_once"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        if self.max_sequence_tokens < 2:
            raise ValueError(f"max_sequence_tokens is {self.max_sequence_tokens}, a prompt and a completion need at least 2")
        if self.token_budget < self.max_sequences:
            raise ValueError(
                f"token_budget {self.token_budget} is less than max_sequences {self.max_sequences}: each decodes in each step"
            )
        if self.prefill_tokens_max > self.token_budget:
            raise ValueError(f"prefill_tokens_max {self.prefill_tokens_max} is more than token_budget {self.token_budget}")
        if not 1 <= self.prefill_tokens_beside <= self.prefill_tokens_max:
            message = f"prefill_tokens_beside_max {self.prefill_tokens_beside} is not within 1 and {self.prefill_tokens_max}"
            raise ValueError(message)

    @property
    def prefill_tokens_beside(self) -> int:
        return self.prefill_tokens_max if self.prefill_tokens_beside_max is None else self.prefill_tokens_beside_max


class Scheduler:
    """The sequences of one engine. Call `handle` at step borders only, and `apply` once for each batch of `schedule`."""

    def __init__(self, settings: SchedulerSettings, allocator: BlockAllocator, prefix_index: PrefixIndex) -> None:
        if settings.block_size != prefix_index.block_size:
            raise ValueError(
                f"block_size is {settings.block_size} in the settings and {prefix_index.block_size} in the prefix index"
            )
        self._settings = settings
        self._allocator = allocator
        self._blocks = SequenceBlocks(allocator, prefix_index, settings.growth_blocks)
        self._sequences: dict[AttemptKey, Sequence] = {}
        self._waiting = WaitingLine()
        self._running: list[Sequence] = []  # by arrival
        self._prefilling: dict[int, Sequence] = {}  # by arrival number, those that run and lack more than one token
        self._reserved: dict[AttemptKey, Sequence] = {}
        self._handoffs: set[AttemptKey] = set()
        self._num_arrivals = 0
        self._batch: StepBatch | None = None
        self._scheduled: list[Sequence] = []
        self._num_scheduled: list[int] = []
        self.num_preemptions = 0
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_decode_tokens = 0

    # ---- commands ------------------------------------------------------------------------------------------------

    def handle(self, command: Command, now: float) -> list[Event]:
        """Takes one command. What cannot be taken gives a Refused event; a command for an unknown key gives nothing."""
        assert self._batch is None, f"{type(command).__name__} came while a step runs; commands take effect at step borders"
        match command:
            case commands.Generate(spec):
                return self._take(spec, Kind.GENERATE)
            case commands.Prefill(spec):
                return self._take(spec, Kind.PREFILL)
            case commands.Reserve(spec):
                return self._take(spec, Kind.RECEIVE)
            case commands.Commit(key, first_token_id):
                return self._commit(key, first_token_id)
            case commands.ReleaseHandoff(key):
                self._release_handoff(key)
                return []
            case commands.Abort(key):
                sequence = self._sequences.get(key)
                return [] if sequence is None else [self._end(sequence, FinishReason.ABORT)]

    def abort_all(self) -> list[Event]:
        """Ends every sequence, for shutdown; handoff Holds stay."""
        assert self._batch is None
        return [self._end(sequence, FinishReason.ABORT) for sequence in list(self._sequences.values())]

    def _take(self, spec: SequenceSpec, kind: Kind) -> list[Event]:
        try:
            if spec.key in self._sequences or spec.key in self._handoffs:
                raise InvalidRequest(f"attempt {spec.key} is already known to this engine")
            check_spec(spec)
            self._num_arrivals += 1
            sequence = Sequence(spec, kind, self._num_arrivals)
            check_size(sequence, self._settings.max_sequence_tokens, self._settings.block_size, self._allocator.num_blocks)
            if kind is Kind.RECEIVE:
                return [self._reserve(sequence)]
            if self._waiting.num_new >= self._settings.waiting_max:
                raise self._overloaded(f"{self._waiting.num_new} sequences are waiting, no more are taken")
        except BatonError as error:
            return [Refused(spec.key, error.kind, error.message, error.retry_after_s or 0.0)]
        self._sequences[spec.key] = sequence
        self._waiting.add(sequence)
        return []

    def _overloaded(self, message: str) -> Overloaded:
        return Overloaded(message, retry_after_s=self._settings.retry_after_s)

    def _reserve(self, sequence: Sequence) -> Reserved:
        """Blocks now or a refusal. The oldest waiting sequence goes first, or a stream of reservations could starve it."""
        head = self._waiting.head()
        num_active = len(self._running) + len(self._reserved)
        if num_active + (head is not None) >= self._settings.max_sequences:
            raise self._overloaded(
                f"{num_active} of {self._settings.max_sequences} sequences are active, {len(self._waiting)} wait"
            )
        sequence.state = State.RESERVED
        headroom = self._headroom(sequence)
        if head is not None:
            headroom += self._blocks.num_known(head) + self._blocks.growth_of(head)
        if not self._blocks.admit(sequence, headroom):
            num_blocks, num_available = self._blocks.num_known(sequence), self._allocator.num_available
            raise self._overloaded(f"{num_blocks} KV blocks and {headroom} to grow are asked for, {num_available} are available")
        self._sequences[sequence.key] = self._reserved[sequence.key] = sequence
        return Reserved(sequence.key, tuple(sequence.block_ids), sequence.num_computed)

    def _commit(self, key: AttemptKey, first_token_id: int) -> list[Event]:
        sequence = self._sequences.get(key)
        if sequence is None:  # aborted while the KV was on its way
            return []
        assert sequence.state is State.RESERVED, f"{key} is committed while it is {sequence.state.value}"
        del self._reserved[key]
        sequence.state = State.RUNNING
        insort(self._running, sequence, key=arrival_of)
        self._blocks.set_computed(sequence, len(sequence.token_ids))
        reason = self._append(sequence, first_token_id)
        return [] if reason is None else [self._end(sequence, reason)]

    def _release_handoff(self, key: AttemptKey) -> None:
        sequence = self._sequences.get(key)
        if sequence is not None:
            sequence.has_handoff = False  # it may still be waiting, and would take the Hold later
        self._blocks.release_handoff(key)
        self._handoffs.discard(key)

    # ---- a step --------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepBatch | None:
        """The next step's work: decodes, then chunks of prompts. None: nothing can be done until the next command."""
        assert self._batch is None, "schedule came before the last batch was applied"
        builder = StepBuilder(self._settings.block_size)
        self._schedule_decodes(builder)
        settings, num_decodes = self._settings, builder.num_tokens
        num_prefill_max = settings.prefill_tokens_beside if num_decodes else settings.prefill_tokens_max
        num_tokens_max = min(num_decodes + num_prefill_max, settings.token_budget)
        num_prefill = num_tokens_max - num_decodes
        if num_prefill:
            admitted = self._admit(num_prefill)
            prompts = [self._prefilling[arrival] for arrival in sorted(self._prefilling)]
            prompts += [sequence for sequence in admitted if sequence.num_uncomputed == 1]
            for sequence, num_tokens in share_out(num_prefill, prompts):
                builder.add(sequence, min(num_tokens, RATED_CHUNK_MAX) if sequence.rates_prompt else num_tokens)
        if builder.num_tokens:
            self._num_steps += 1
            self._num_decode_tokens += num_decodes
            self._num_prompt_tokens += builder.num_tokens - num_decodes
        self._batch, self._scheduled, self._num_scheduled = builder.build(), builder.scheduled, builder.num_scheduled
        for sequence in self._scheduled:
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now
            if len(sequence.token_ids) == len(sequence.spec.token_ids):
                sequence.num_chunks += 1
        return self._batch

    def _schedule_decodes(self, builder: StepBuilder) -> None:
        """One token for each sequence with one to compute, oldest first, so that a victim is never one already scheduled."""
        for sequence in list(self._running):
            if sequence.state is not State.RUNNING or sequence.num_uncomputed != 1:
                continue
            while sequence.state is State.RUNNING and not self._blocks.grow(sequence):
                self._preempt(next(victim for victim in reversed(self._running) if victim.is_preemptible))
            if sequence.state is State.RUNNING:
                builder.add(sequence, 1)

    def _preempt(self, victim: Sequence) -> None:
        """Takes all blocks of a sequence. It keeps its known tokens and computes them again when there is room."""
        self._leave_running(victim)
        self._blocks.release(victim)
        victim.state = State.WAITING
        self._waiting.put_back(victim)
        self.num_preemptions += 1

    def _leave_running(self, sequence: Sequence) -> None:
        index = bisect_left(self._running, sequence.arrival, key=arrival_of)
        assert self._running[index] is sequence, f"{sequence.key} does not run"
        del self._running[index]
        self._prefilling.pop(sequence.arrival, None)

    def _admit(self, num_prefill: int) -> list[Sequence]:
        """New sequences for this step, in order: until the prompts under way use up `num_prefill` tokens, but a few in any case,
        so that a short prompt need not wait for a long one that came before it."""
        num_uncomputed = sum(sequence.num_uncomputed for sequence in self._prefilling.values())
        admitted: list[Sequence] = []
        while num_uncomputed < num_prefill or len(self._prefilling) < self._settings.prompts_at_once:
            sequence = self._waiting.head()
            if sequence is None or len(self._running) + len(self._reserved) >= self._settings.max_sequences:
                break
            if not self._blocks.admit(sequence, self._headroom(sequence)):
                break
            self._waiting.remove(sequence)
            sequence.state = State.RUNNING
            insort(self._running, sequence, key=arrival_of)
            if sequence.num_uncomputed > 1:
                self._prefilling[sequence.arrival] = sequence
            if sequence.has_handoff:
                self._handoffs.add(sequence.key)
            admitted.append(sequence)
            num_uncomputed += sequence.num_uncomputed
        return admitted

    def _headroom(self, sequence: Sequence) -> int:
        """Blocks that must stay available when a sequence is admitted: the watermark that keeps preemption from thrashing."""
        return self._blocks.growth_of(sequence) + self._blocks.num_kept_for_growth

    def apply(self, batch: StepBatch, results: StepResults, now: float) -> list[Event]:
        """Takes in a step's results: one sampled token per sample row, in their order."""
        assert batch is self._batch, "apply got another batch than schedule returned last"
        sampled = results.token_ids
        assert len(sampled) == len(batch.sample_rows), f"{len(sampled)} tokens for {len(batch.sample_rows)} sample rows"
        self._batch, self._scheduled, step = None, [], self._scheduled
        block_size, prefilling = self._settings.block_size, self._prefilling
        tokens, rated = iter(sampled), iter(results.logprobs)
        events: list[Event] = []
        for rows, logprobs_of_rows in zip(batch.prompt_rows, results.prompt_logprobs, strict=True):
            sequence = step[rows.sequence_index]
            events.append(PromptLogprobs(sequence.key, sequence.num_rated + 1, logprobs_of_rows))
            sequence.num_rated += len(logprobs_of_rows)
        for sequence, num_tokens in zip(step, self._num_scheduled, strict=True):
            num_computed = sequence.num_computed + num_tokens
            if num_tokens == 1 and num_computed % block_size:  # most decodes: no block became full
                sequence.num_computed = num_computed
            else:
                self._blocks.set_computed(sequence, num_computed)
            if prefilling and num_computed + 1 >= len(sequence.token_ids):
                prefilling.pop(sequence.arrival, None)
            if sequence.kind is Kind.PREFILL:
                events.append(self._chunk_computed(sequence))
            if num_computed == len(sequence.token_ids):
                token_id, token_index, logprobs = next(tokens), sequence.next_token_index, next(rated, None)
                reason = self._append(sequence, token_id)
                events.append(Sampled(sequence.key, token_index, (token_id,), logprobs=() if logprobs is None else (logprobs,)))
                if reason is not None:
                    events.append(self._end(sequence, reason))
        return events

    def _append(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """A token becomes known. A prefill-only sequence has reached its length then, if nothing else ended it."""
        reason = finish_reason(token_id, sequence.next_token_index, sequence.spec.stop)
        sequence.token_ids.append(token_id)
        return FinishReason.LENGTH if reason is None and sequence.kind is Kind.PREFILL else reason

    def _chunk_computed(self, sequence: Sequence) -> ChunkComputed:
        num_computed, size = sequence.num_computed, self._settings.block_size
        first_new, sequence.num_reported_blocks = sequence.num_reported_blocks, num_computed // size
        block_ids = tuple(sequence.block_ids[: -(-num_computed // size)])
        return ChunkComputed(sequence.key, num_computed, sequence.num_cached_tokens or 0, first_new, block_ids)

    def _end(self, sequence: Sequence, reason: FinishReason) -> SequenceEnded:
        """Frees what the sequence holds, whatever its state. A handoff Hold stays until ReleaseHandoff."""
        del self._sequences[sequence.key]
        match sequence.state:
            case State.WAITING:
                self._waiting.remove(sequence)
            case State.RESERVED:
                del self._reserved[sequence.key]
            case State.RUNNING:
                self._leave_running(sequence)
        self._blocks.release(sequence)
        return SequenceEnded(
            key=sequence.key,
            reason=reason,
            num_tokens=sequence.next_token_index,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            num_chunks=sequence.num_chunks,
            scheduled_s=sequence.scheduled_s or 0.0,
        )

    # ---- views ---------------------------------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens + sum(sequence.num_uncomputed for sequence in self._prefilling.values()),
            num_blocks_available=self._allocator.num_available,
            num_handoffs=len(self._reserved) + len(self._handoffs),
        )

    def counts(self) -> EngineCounts:
        """Since the start; a step counts when it is scheduled."""
        return EngineCounts(
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_decode_tokens=self._num_decode_tokens,
            num_prefix_hit_tokens=self._blocks.num_hit_tokens,
            num_preemptions=self.num_preemptions,
        )

    def census(self) -> BlockCensus:
        return self._allocator.census()

    def check_balance(self) -> None:
        """Asserts that every Hold has a live reason; O(sequences). The engine loop calls it when it becomes idle."""
        self._allocator.check_balance()
        owners = {sequence.owner for sequence in (*self._running, *self._reserved.values())} | set(
            map(handoff_owner, self._handoffs)
        )
        census = self._allocator.census()
        assert census.held_by.keys() == owners, (
            f"Holds without a reason, or the reverse: {sorted(census.held_by.keys() ^ owners)}"
        )
        self._blocks.check_balance((*self._running, *self._reserved.values()))
        prefilling = {sequence.arrival: sequence for sequence in self._running if sequence.num_uncomputed > 1}
        assert self._prefilling == prefilling, f"sequences {sorted(prefilling)} prefill, {sorted(self._prefilling)} are known to"
        num_live = len(self._waiting) + len(self._running) + len(self._reserved)
        assert num_live == len(self._sequences), f"{len(self._sequences)} sequences are known, {num_live} have a place"
