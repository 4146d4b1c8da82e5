"""Two engines under any commands in any order: a prefill and a decode scheduler, handoffs between them, local work on both.

Sequences start, are copied in pieces, commit, are aborted on either side at any moment, and are preempted in pools too small for
them. Whatever happens, the tokens reported so far are the start of what a lone run gives, every sequence that is not aborted
ends with all of them, and no block is held when all has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from common.ids import AttemptKey
from common.types import FinishReason
from engine.commands import Abort, Commit, Generate, Prefill, ReleaseHandoff, Reserve, SequenceSpec
from tests.fakes.engine_driver import EngineDriver, make_spec
from tests.fakes.kv_oracle import copy_blocks, lone_run

VOCAB = 11
"""Small, so that stop tokens are hit often."""


@dataclass(slots=True)
class Handoff:
    spec: SequenceSpec
    num_copied: int
    is_committed: bool = False
    is_dead: bool = False


@st.composite
def prompts(draw: st.DrawFn, block_size: int = 4) -> list[int]:
    """Few distinct starts, so that prefixes are shared, and lengths around block borders."""
    start = draw(st.integers(0, 2))
    length = max(1, draw(st.integers(0, 4)) * block_size + draw(st.integers(-1, 1)))
    tail = draw(st.integers(0, 2))
    return [*[(start + index) % VOCAB for index in range(length)], *[(7 + index) % VOCAB for index in range(tail)]]


class EnginePairMachine(RuleBasedStateMachine):
    handoffs = Bundle("handoffs")
    local = Bundle("local")

    def __init__(self) -> None:
        super().__init__()
        self.num_specs = 0
        self.expected: dict[AttemptKey, tuple[SequenceSpec, list[int]]] = {}
        self.is_aborted: set[AttemptKey] = set()
        self.all_handoffs: list[Handoff] = []
        self.all_local: list[tuple[EngineDriver, SequenceSpec]] = []

    @initialize(
        num_prefill_blocks=st.integers(9, 16),
        num_decode_blocks=st.integers(9, 16),
        growth_blocks=st.sampled_from([0, 0, 1, 2]),
        prefill_tokens_max=st.integers(1, 12),
        max_sequences=st.integers(2, 6),
    )
    def start_engines(self, num_prefill_blocks, num_decode_blocks, growth_blocks, prefill_tokens_max, max_sequences) -> None:
        def engine(num_blocks: int) -> EngineDriver:
            return EngineDriver(
                num_blocks=num_blocks,
                token_budget=12,
                prefill_tokens_max=prefill_tokens_max,
                max_sequences=max_sequences,
                waiting_max=4,
                growth_blocks=growth_blocks,
                vocab_size=VOCAB,
            )

        self.prefill, self.decode = engine(num_prefill_blocks), engine(num_decode_blocks)

    def new_spec(
        self, prompt: list[int], max_new_tokens: int, has_stop: bool, min_new_tokens: int, num_emitted: int
    ) -> SequenceSpec:
        """A fresh sequence, or the continuation of one after `num_emitted` tokens (as after the loss of a decode worker)."""
        self.num_specs += 1
        limits = {"stop_token_ids": (3,) if has_stop else (), "min_new_tokens": min_new_tokens, "seed": self.num_specs % 3}
        spec = make_spec(self.num_specs, prompt, max_new_tokens, **limits)
        expected = lone_run(spec, VOCAB)
        num_emitted = min(num_emitted, len(expected) - 1)
        if num_emitted:
            spec = make_spec(self.num_specs, prompt, max_new_tokens, emitted=tuple(expected[:num_emitted]), **limits)
        self.expected[spec.key] = spec, expected[num_emitted:]
        return spec

    specs = {
        "prompt": prompts(),
        "max_new_tokens": st.sampled_from([1, 2, 5, 12, 18, 24]),
        "has_stop": st.sampled_from([False, False, True]),
        "min_new_tokens": st.integers(0, 4),
        "num_emitted": st.sampled_from([0, 0, 0, 1, 3, 7]),
    }

    @rule(target=local, on_prefill=st.booleans(), **specs)
    def generate(self, on_prefill: bool, **numbers):
        spec = self.new_spec(**numbers)
        driver = self.prefill if on_prefill else self.decode
        if driver.handle(Generate(spec)):
            assert driver[spec.key].refused is not None
            return multiple()
        self.all_local.append((driver, spec))
        return driver, spec

    @rule(work=consumes(local))
    def abort_local(self, work) -> None:
        driver, spec = work
        self.is_aborted.add(spec.key)
        driver.handle(Abort(spec.key, "test"))

    @rule(target=handoffs, reserve_first=st.booleans(), **specs)
    def start_handoff(self, reserve_first: bool, **numbers):
        spec = self.new_spec(**numbers)
        legs = [(self.prefill, Prefill(spec)), (self.decode, Reserve(spec))]
        for driver, command in reversed(legs) if reserve_first else legs:
            driver.handle(command)
        handoff = Handoff(spec, 0)
        self.all_handoffs.append(handoff)
        prefill_refused = spec.key in self.prefill.outcomes and self.prefill[spec.key].refused is not None
        if prefill_refused or self.decode[spec.key].refused is not None:
            self.settle(handoff)
            return multiple()
        handoff.num_copied = self.decode[spec.key].reserved.num_cached_tokens // 4
        return handoff

    def settle(self, handoff: Handoff) -> None:
        """The end of a handoff that will not commit, in the order of the services: transfer over, then both engines."""
        handoff.is_dead = True
        self.is_aborted.add(handoff.spec.key)
        self.decode.handle(Abort(handoff.spec.key, "settled"))
        self.prefill.handle(Abort(handoff.spec.key, "settled"))
        self.prefill.handle(ReleaseHandoff(handoff.spec.key))

    @rule(handoff=handoffs, num_max=st.integers(1, 4))
    def copy(self, handoff: Handoff, num_max: int) -> None:
        """Moves some of the blocks that are final and not moved yet."""
        outcome = self.prefill.outcomes.get(handoff.spec.key)
        if handoff.is_dead or handoff.is_committed or outcome is None or not outcome.chunks:
            return
        chunk = outcome.chunks[-1]
        is_whole = chunk.num_computed_tokens == len(handoff.spec.token_ids)
        num_final = len(chunk.block_ids) if is_whole else chunk.num_computed_tokens // 4
        until = min(num_final, handoff.num_copied + num_max)
        if until > handoff.num_copied:
            target = self.decode[handoff.spec.key].reserved.block_ids
            moved = slice(handoff.num_copied, until)
            copy_blocks(self.prefill.runner, chunk.block_ids[moved], self.decode.runner, target[moved])
            handoff.num_copied = until

    @rule(handoff=handoffs)
    def commit(self, handoff: Handoff) -> None:
        outcome = self.prefill.outcomes.get(handoff.spec.key)
        if handoff.is_dead or handoff.is_committed or outcome is None or not outcome.tokens:
            return  # without token 0 there is no closing announcement, even if decode lacks no block
        if handoff.num_copied == len(self.decode[handoff.spec.key].reserved.block_ids):
            handoff.is_committed = True
            self.prefill.handle(ReleaseHandoff(handoff.spec.key))
            self.decode.handle(Commit(handoff.spec.key, outcome.tokens[0]))

    @rule(handoff=handoffs, num_steps=st.integers(1, 6))
    def run_handoff(self, handoff: Handoff, num_steps: int) -> None:
        """The common way, all in one: prefill computes, everything final is moved, and decode takes over if that was all."""
        self.step_prefill(num_steps)
        self.copy(handoff, 100)
        self.commit(handoff)
        self.step_decode(num_steps)

    @rule(handoff=consumes(handoffs))
    def abort_handoff(self, handoff: Handoff) -> None:
        if not handoff.is_committed:
            self.settle(handoff)
        else:
            self.is_aborted.add(handoff.spec.key)
            self.decode.handle(Abort(handoff.spec.key, "client left"))

    @rule(handoff=handoffs)
    def abort_the_prefill_sequence_only(self, handoff: Handoff) -> None:
        """Its blocks must stay for the transfer; the handoff itself is settled later."""
        if not handoff.is_dead and not handoff.is_committed and self.prefill.handle(Abort(handoff.spec.key, "test")):
            self.is_aborted.add(handoff.spec.key)

    @rule(num_steps=st.integers(1, 8))
    def step_prefill(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.prefill.step()

    @rule(num_steps=st.integers(1, 8))
    def step_decode(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.decode.step()

    def tokens_of_handoff(self, handoff: Handoff) -> list[int]:
        parts = [driver.outcomes.get(handoff.spec.key) for driver in (self.prefill, self.decode)]
        return [token for part in parts if part is not None for token in part.tokens]

    @invariant()
    def reported_tokens_are_the_start_of_a_lone_run(self) -> None:
        for handoff in self.all_handoffs:
            tokens = self.tokens_of_handoff(handoff)
            assert tokens == self.expected[handoff.spec.key][1][: len(tokens)]
        for driver, spec in self.all_local:
            tokens = driver.outcomes[spec.key].tokens if spec.key in driver.outcomes else []
            assert tokens == self.expected[spec.key][1][: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "prefill"):
            return
        for _ in range(500):
            steps = [self.prefill.step(), self.decode.step()]
            for handoff in self.all_handoffs:
                self.copy(handoff, 100)
                if handoff.spec.key in self.is_aborted and not handoff.is_dead and not handoff.is_committed:
                    self.settle(handoff)
                self.commit(handoff)
            if steps == [None, None] and all(handoff.is_dead or handoff.is_committed for handoff in self.all_handoffs):
                break
        self.prefill.run_until_idle()
        self.decode.run_until_idle()
        for handoff in self.all_handoffs:
            if handoff.spec.key not in self.is_aborted:
                assert self.tokens_of_handoff(handoff) == self.expected[handoff.spec.key][1], f"{handoff.spec}"
                assert self.decode[handoff.spec.key].reason in (FinishReason.STOP, FinishReason.LENGTH)
        for driver, spec in self.all_local:
            if spec.key not in self.is_aborted:
                assert driver[spec.key].tokens == self.expected[spec.key][1]
                assert driver[spec.key].reason in (FinishReason.STOP, FinishReason.LENGTH)
        for driver in (self.prefill, self.decode):
            driver.assert_no_block_held()
            load = driver.scheduler.load()
            assert (load.num_running, load.num_waiting, load.num_waiting_tokens, load.num_handoffs) == (0, 0, 0, 0)


EnginePairMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestEnginePairMachine = EnginePairMachine.TestCase
