"""Drives a real scheduler with the KV oracle, step by step, and keeps what each sequence got.

After every command and step it poisons the free blocks and checks the allocator block by block, so a test only says what happens
and what must come out. It owns nothing that the engine does not own in production; `now` is the number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.ids import AttemptKey, RequestId
from common.types import FinishReason, SamplingParams, StopConditions, TokenLogprobs
from engine.batch import StepBatch
from engine.block_allocator import BlockAllocator
from engine.commands import ChunkComputed, Command, Event, PromptLogprobs, Refused, Reserved, Sampled, SequenceEnded, SequenceSpec
from engine.prefix_index import PrefixIndex
from engine.scheduler import Scheduler, SchedulerSettings
from tests.fakes.kv_oracle import FakeRunner

STEPS_MAX = 5000


def key(name: str | int, epoch: int = 1) -> AttemptKey:
    return AttemptKey(RequestId(f"r{name}"), epoch)


def make_spec(
    name: str | int,
    prompt: list[int] | tuple[int, ...] | range,
    max_new_tokens: int = 4,
    *,
    emitted: tuple[int, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    min_new_tokens: int = 0,
    salt: bytes = b"",
    seed: int = 0,
) -> SequenceSpec:
    return SequenceSpec(
        key=key(name),
        token_ids=(*prompt, *emitted),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(seed=seed),
        stop=StopConditions(max_new_tokens, min_new_tokens, stop_token_ids),
        cache_salt=salt,
    )


@dataclass(slots=True)
class Outcome:
    """All that was reported of one sequence."""

    tokens: list[int] = field(default_factory=list)
    first_index: int | None = None
    ended: SequenceEnded | None = None
    refused: Refused | None = None
    reserved: Reserved | None = None
    chunks: list[ChunkComputed] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def reason(self) -> FinishReason | None:
        return None if self.ended is None else self.ended.reason


class EngineDriver:
    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        token_budget: int = 16,
        prefill_tokens_max: int | None = None,
        prefill_tokens_beside_max: int | None = None,
        max_sequences: int = 8,
        max_sequence_tokens: int | None = None,
        waiting_max: int = 64,
        growth_blocks: int = 1,
        prompts_at_once: int = 4,
        vocab_size: int = 97,
    ) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)
        self.runner = FakeRunner(num_blocks, block_size, vocab_size)
        settings = SchedulerSettings(
            block_size=block_size,
            token_budget=token_budget,
            prefill_tokens_max=prefill_tokens_max or token_budget,
            prefill_tokens_beside_max=prefill_tokens_beside_max,
            max_sequences=max_sequences,
            max_sequence_tokens=max_sequence_tokens or num_blocks * block_size + 1,
            waiting_max=waiting_max,
            growth_blocks=growth_blocks,
            prompts_at_once=prompts_at_once,
        )
        self.scheduler = Scheduler(settings, self.allocator, PrefixIndex(self.allocator, block_size, b"oracle"))
        self.outcomes: dict[AttemptKey, Outcome] = {}
        self.last_batch: StepBatch | None = None
        self.now = 0.0

    def handle(self, command: Command) -> list[Event]:
        return self._take(self.scheduler.handle(command, self.now))

    def step(self) -> list[Event] | None:
        """One step; None if there was nothing to compute."""
        self.now += 1.0
        self.last_batch = batch = self.scheduler.schedule(self.now)
        if batch is None:
            self.check()
            return None
        return self._take(self.scheduler.apply(batch, self.runner.run(batch), self.now))

    def run_until_idle(self) -> None:
        for _ in range(STEPS_MAX):
            if self.step() is None:
                return
        raise AssertionError(f"still busy after {STEPS_MAX} steps: {self.scheduler.load()}")

    def __getitem__(self, name: str | int | AttemptKey) -> Outcome:
        return self.outcomes[name if isinstance(name, AttemptKey) else key(name)]

    def check(self) -> None:
        self.allocator.check_integrity()
        self.scheduler.check_balance()
        self.runner.poison(self.allocator.free_block_ids())

    def assert_no_block_held(self) -> None:
        census = self.allocator.census()
        assert census.held == 0 and not census.held_by, f"leaked: {census.held_by}"
        assert census.free + census.cached == census.total

    def _take(self, events: list[Event]) -> list[Event]:
        for event in events:
            outcome = self.outcomes.setdefault(event.key, Outcome())
            assert outcome.ended is None or isinstance(event, Refused), f"{event} after the end of {event.key}"
            match event:
                case Sampled():
                    if outcome.first_index is None:
                        outcome.first_index = event.first_index
                    assert event.first_index == outcome.first_index + len(outcome.tokens), (
                        f"{event}: an index is lost or repeated"
                    )
                    outcome.tokens.extend(event.token_ids)
                case SequenceEnded():
                    outcome.ended = event
                case Refused():
                    outcome.refused = event
                case Reserved():
                    outcome.reserved = event
                case ChunkComputed():
                    outcome.chunks.append(event)
                case PromptLogprobs():
                    assert outcome.first_index is None, "logprobs of the prompt come before the first token"
                    assert event.first_position == len(outcome.prompt_logprobs) + 1, f"{event}: a position is lost or repeated"
                    outcome.prompt_logprobs.extend(event.logprobs)
        self.check()
        return events
