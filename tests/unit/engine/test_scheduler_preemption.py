"""Claims about preemption: who goes, that nothing is lost or repeated by it, and that it does not thrash."""

from __future__ import annotations

from common.types import FinishReason
from engine.commands import Abort, Generate, Prefill, ReleaseHandoff, Reserve
from tests.fakes.engine_driver import EngineDriver, key, make_spec
from tests.fakes.kv_oracle import lone_run
from tests.unit.engine.test_scheduler_handoff import hand_over

VOCAB = 97


def test_with_a_pool_for_two_all_of_eight_sequences_finish_with_their_tokens() -> None:
    driver = EngineDriver(num_blocks=10, token_budget=16)
    specs = [make_spec(index, range(index * 10, index * 10 + 9), 20) for index in range(8)]
    for spec in specs:
        driver.handle(Generate(spec))
    driver.run_until_idle()
    assert driver.scheduler.num_preemptions > 0
    for spec in specs:
        assert driver[spec.key].tokens == lone_run(spec, VOCAB)
    driver.assert_no_block_held()


def test_the_last_arrived_is_preempted_and_the_first_never() -> None:
    driver = EngineDriver(num_blocks=9, token_budget=32, growth_blocks=0)
    for index in range(3):
        driver.handle(Generate(make_spec(index, range(index * 20, index * 20 + 12), 16)))
    driver.step()
    assert driver.scheduler.load().num_running == 3
    driver.step()
    assert driver.scheduler.num_preemptions == 1
    assert not any(owner.startswith("seq:r2") for owner in driver.scheduler.census().held_by)
    order = []
    while (events := driver.step()) is not None:
        order += [event.key for event in events if hasattr(event, "reason")]
    assert order == [key(0), key(1), key(2)]


def test_a_preempted_sequence_keeps_its_first_cached_count_and_finds_its_own_blocks() -> None:
    driver = EngineDriver(num_blocks=12, token_budget=32, growth_blocks=0)
    driver.handle(Generate(make_spec("a", range(12), 22)))
    driver.handle(Generate(make_spec("b", range(50, 62), 22)))
    driver.run_until_idle()
    assert driver.scheduler.num_preemptions >= 1
    assert driver["b"].ended.num_cached_tokens == 0, "finding its own blocks again is no prefix hit of the request"
    for name, first in (("a", 0), ("b", 50)):
        assert driver[name].tokens == lone_run(make_spec(name, range(first, first + 12), 22), VOCAB)


def test_growth_blocks_keep_preemption_from_thrashing() -> None:
    def num_preemptions(growth_blocks: int) -> int:
        driver = EngineDriver(num_blocks=16, token_budget=64, growth_blocks=growth_blocks)
        for index in range(8):
            driver.handle(Generate(make_spec(index, range(index * 10, index * 10 + 8), 24)))
        driver.run_until_idle()
        for index in range(8):
            assert driver[index].tokens == lone_run(make_spec(index, range(index * 10, index * 10 + 8), 24), VOCAB)
        return driver.scheduler.num_preemptions

    assert num_preemptions(6) == 0, "enough room for all that is admitted"
    assert num_preemptions(2) < num_preemptions(0)


def test_a_committed_sequence_is_recomputed_locally_after_preemption() -> None:
    prefill, decode = EngineDriver(), EngineDriver(num_blocks=9, growth_blocks=0)
    decode.handle(Generate(make_spec("first", range(100, 112), 20)))
    decode.step()
    spec = make_spec("handed", range(12), 20)
    hand_over(prefill, decode, spec)
    decode.run_until_idle()
    assert decode.scheduler.num_preemptions >= 1
    assert prefill["handed"].tokens + decode["handed"].tokens == lone_run(spec, VOCAB)
    assert decode["first"].tokens == lone_run(make_spec("first", range(100, 112), 20), VOCAB)
    decode.assert_no_block_held()


def test_a_sequence_that_receives_its_kv_is_never_preempted() -> None:
    driver = EngineDriver(num_blocks=8, growth_blocks=0)
    driver.handle(Generate(make_spec("a", range(16), 16)))
    driver.step()
    driver.handle(Reserve(make_spec("b", range(100, 116), 4)))
    driver.run_until_idle()
    assert driver["a"].ended is None, "it gave way and waits"
    assert driver.scheduler.census().held_by == {"seq:rb#1": 4}
    driver.handle(Abort(key("b"), "settled"))
    driver.run_until_idle()
    assert driver["a"].tokens == lone_run(make_spec("a", range(16), 16), VOCAB)


def test_a_prefill_is_never_preempted_because_a_peer_may_be_reading_its_blocks() -> None:
    driver = EngineDriver(num_blocks=8, token_budget=8, prefill_tokens_max=4, growth_blocks=0)
    driver.handle(Generate(make_spec("a", range(8), 20)))
    driver.step()
    driver.step()
    driver.handle(Prefill(make_spec("p", range(100, 120), 4)))
    driver.run_until_idle()
    assert driver.scheduler.num_preemptions == 1, "a gave way to itself, p kept its blocks"
    chunks = driver["p"].chunks
    assert all(chunks[-1].block_ids[: len(chunk.block_ids)] == chunk.block_ids for chunk in chunks)
    assert driver["p"].tokens == lone_run(make_spec("p", range(100, 120), 1), VOCAB)
    driver.handle(ReleaseHandoff(key("p")))
    driver.run_until_idle()
    assert driver["a"].tokens == lone_run(make_spec("a", range(8), 20), VOCAB)


def test_a_preempted_sequence_comes_before_new_arrivals_and_can_be_aborted_while_it_waits() -> None:
    driver = EngineDriver(num_blocks=8, growth_blocks=0, token_budget=32)
    driver.handle(Generate(make_spec("a", range(16), 10)))
    driver.handle(Generate(make_spec("b", range(50, 66), 10)))
    driver.step()
    driver.handle(Generate(make_spec("c", [1], 2)))
    driver.step()
    assert driver.scheduler.num_preemptions == 1 and driver.scheduler.load().num_waiting == 2
    driver.step()
    assert driver.scheduler.load().num_waiting == 2, "c would fit, but b goes first"
    (ended,) = driver.handle(Abort(key("b"), "client left"))
    assert ended.reason is FinishReason.ABORT and ended.num_tokens == 1
    driver.run_until_idle()
    assert driver["c"].tokens == lone_run(make_spec("c", [1], 2), VOCAB)
    driver.assert_no_block_held()
