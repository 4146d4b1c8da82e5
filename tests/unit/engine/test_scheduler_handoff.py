"""Claims about the two ends of a handoff inside the schedulers: Prefill with its Hold, Reserve, Commit, Abort."""

from __future__ import annotations

import pytest

from common.types import FinishReason
from engine.commands import Abort, Commit, Generate, Prefill, ReleaseHandoff, Reserve
from tests.fakes.engine_driver import EngineDriver, key, make_spec
from tests.fakes.kv_oracle import copy_blocks, lone_run

VOCAB = 97
BORDER_LENGTHS = [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33]


def hand_over(prefill: EngineDriver, decode: EngineDriver, spec) -> None:
    """Prefills on one engine, copies the missing blocks, and commits on the other."""
    prefill.handle(Prefill(spec))
    decode.handle(Reserve(spec))
    prefill.run_until_idle()
    source, reserved = prefill[spec.key].chunks[-1], decode[spec.key].reserved
    assert source.num_computed_tokens == len(spec.token_ids)
    first = reserved.num_cached_tokens // decode.block_size
    copy_blocks(prefill.runner, source.block_ids[first:], decode.runner, reserved.block_ids[first:])
    prefill.handle(ReleaseHandoff(spec.key))
    decode.handle(Commit(spec.key, prefill[spec.key].tokens[0]))


@pytest.mark.parametrize("num_prompt", BORDER_LENGTHS)
def test_disaggregated_tokens_equal_a_lone_run_around_block_borders_cold_and_warm(num_prompt: int) -> None:
    prefill, decode = EngineDriver(), EngineDriver()
    cold, warm = (make_spec(name, range(10, 10 + num_prompt), 9) for name in ("cold", "warm"))
    for spec in (cold, warm):
        hand_over(prefill, decode, spec)
        decode.run_until_idle()
        tokens = prefill[spec.key].tokens + decode[spec.key].tokens
        assert tokens == lone_run(cold, VOCAB)
        assert decode[spec.key].first_index == 1 and decode[spec.key].ended.num_tokens == 9
    assert decode["cold"].reserved.num_cached_tokens == 0
    assert decode["warm"].reserved.num_cached_tokens == num_prompt // 4 * 4, "received blocks are cached at commit, all full ones"
    assert len(decode["cold"].reserved.block_ids) == -(-num_prompt // 4)
    prefill.assert_no_block_held()
    decode.assert_no_block_held()


def test_chunks_report_a_growing_table_and_each_full_block_once() -> None:
    driver = EngineDriver(token_budget=8, max_sequences=4, prefill_tokens_max=6)
    driver.handle(Prefill(make_spec("a", range(21), 9)))
    driver.run_until_idle()
    chunks = driver["a"].chunks
    assert [chunk.num_computed_tokens for chunk in chunks] == [6, 12, 18, 21]
    assert [chunk.first_new_block_index for chunk in chunks] == [0, 1, 3, 4]
    assert [len(chunk.block_ids) for chunk in chunks] == [2, 3, 5, 6]
    assert all(chunks[-1].block_ids[: len(chunk.block_ids)] == chunk.block_ids for chunk in chunks)


def test_a_prefill_ends_after_one_token_and_its_blocks_stay_until_released() -> None:
    driver = EngineDriver()
    driver.handle(Prefill(make_spec("a", range(10), 9)))
    driver.run_until_idle()
    assert len(driver["a"].tokens) == 1 and driver["a"].reason is FinishReason.LENGTH and driver["a"].ended.num_tokens == 1
    assert driver.scheduler.census().held_by == {"handoff:ra#1": 3}
    assert driver.scheduler.load().num_handoffs == 1
    words = [driver.runner.block(block_id) for block_id in driver["a"].chunks[-1].block_ids]
    driver.handle(Generate(make_spec("other", range(50, 90), 100)))
    driver.run_until_idle()
    assert [driver.runner.block(block_id) for block_id in driver["a"].chunks[-1].block_ids] == words, (
        "held blocks are never reused"
    )
    driver.handle(ReleaseHandoff(key("a")))
    driver.assert_no_block_held()
    assert driver.handle(ReleaseHandoff(key("a"))) == [], "idempotent"
    assert driver.scheduler.load().num_handoffs == 0


def test_a_prefill_whose_first_token_is_a_stop_says_stop() -> None:
    first = lone_run(make_spec("a", range(10)), VOCAB)[0]
    driver = EngineDriver()
    driver.handle(Prefill(make_spec("a", range(10), 9, stop_token_ids=(first,))))
    driver.run_until_idle()
    assert driver["a"].reason is FinishReason.STOP and driver["a"].tokens == [first]


@pytest.mark.parametrize("num_steps", range(6))
def test_abort_of_a_prefill_keeps_the_handoff_hold_until_it_is_released(num_steps: int) -> None:
    driver = EngineDriver(token_budget=8)
    driver.handle(Prefill(make_spec("a", range(21), 9)))
    for _ in range(num_steps):
        driver.step()
    driver.handle(Abort(key("a"), "client left"))
    held_by = driver.scheduler.census().held_by
    assert held_by == ({"handoff:ra#1": 6} if num_steps else {}), "a sequence that never ran has no blocks to keep"
    driver.handle(ReleaseHandoff(key("a")))
    driver.run_until_idle()
    driver.assert_no_block_held()


@pytest.mark.parametrize("num_steps", range(6))
def test_a_release_that_comes_early_leaves_no_hold_behind(num_steps: int) -> None:
    driver = EngineDriver(token_budget=8)
    driver.handle(Prefill(make_spec("a", range(21), 9)))
    for _ in range(num_steps):
        driver.step()
    driver.handle(ReleaseHandoff(key("a")))
    driver.run_until_idle()
    assert driver["a"].tokens == lone_run(make_spec("a", range(21), 1), VOCAB)
    driver.assert_no_block_held()


def test_a_key_under_a_handoff_hold_is_still_known() -> None:
    driver = EngineDriver()
    driver.handle(Prefill(make_spec("a", range(10))))
    driver.run_until_idle()
    (refused,) = driver.handle(Prefill(make_spec("a", range(10))))
    assert refused.error_kind == "InvalidRequest"
    driver.handle(ReleaseHandoff(key("a")))
    assert driver.handle(Prefill(make_spec("a", range(10)))) == []


def test_a_prefill_waits_for_blocks_held_by_handoffs_and_costs_nothing_meanwhile() -> None:
    driver = EngineDriver(num_blocks=8)
    driver.handle(Prefill(make_spec("a", range(20))))
    driver.handle(Prefill(make_spec("b", range(100, 120))))
    driver.run_until_idle()
    assert driver["a"].ended is not None and key("b") not in driver.outcomes
    driver.handle(ReleaseHandoff(key("a")))
    driver.run_until_idle()
    assert driver["b"].tokens == lone_run(make_spec("b", range(100, 120), 1), VOCAB)


@pytest.mark.parametrize("is_committed", [False, True])
def test_abort_of_a_reserved_or_committed_sequence_frees_its_blocks(is_committed: bool) -> None:
    driver = EngineDriver()
    driver.handle(Reserve(make_spec("a", range(10), 9)))
    assert driver.scheduler.load().num_handoffs == 1
    assert driver.step() is None, "a reserved sequence computes nothing"
    if is_committed:
        driver.runner.poison(())
        driver.handle(Commit(key("a"), 5))
    driver.handle(Abort(key("a"), "client left"))
    driver.assert_no_block_held()
    assert driver.handle(Commit(key("a"), 5)) == [], "a commit that comes late is ignored"
    assert driver.step() is None


@pytest.mark.parametrize(
    ("max_new_tokens", "stop_token_ids", "reason"),
    [(1, (), FinishReason.LENGTH), (9, (42,), FinishReason.STOP)],
)
def test_a_commit_whose_first_token_ends_the_sequence_reports_the_end_and_no_token(
    max_new_tokens, stop_token_ids, reason
) -> None:
    driver = EngineDriver()
    driver.handle(Reserve(make_spec("a", range(10), max_new_tokens, stop_token_ids=stop_token_ids)))
    (ended,) = driver.handle(Commit(key("a"), 42))
    assert ended.reason is reason and ended.num_tokens == 1
    assert driver["a"].tokens == []
    driver.assert_no_block_held()


def test_a_resumed_sequence_is_handed_over_at_its_index() -> None:
    whole = make_spec("whole", range(6), 12)
    expected = lone_run(whole, VOCAB)
    prefill, decode = EngineDriver(), EngineDriver()
    spec = make_spec("again", range(6), 12, emitted=tuple(expected[:5]))
    hand_over(prefill, decode, spec)
    decode.run_until_idle()
    assert prefill["again"].first_index == 5 and decode["again"].first_index == 6
    assert prefill["again"].tokens + decode["again"].tokens == expected[5:]


def test_a_reservation_is_refused_at_once_when_blocks_or_slots_are_missing() -> None:
    driver = EngineDriver(num_blocks=8, max_sequences=2)
    driver.handle(Reserve(make_spec("a", range(16), 9)))
    (refused,) = driver.handle(Reserve(make_spec("b", range(100, 116), 9)))
    assert refused.error_kind == "Overloaded" and refused.retry_after_s > 0, "4 blocks are there, but none to grow"
    driver.handle(Reserve(make_spec("c", range(200, 204), 9)))
    (refused,) = driver.handle(Reserve(make_spec("d", [1], 2)))
    assert refused.error_kind == "Overloaded" and "2 of 2 sequences are active" in refused.message
    assert set(driver.scheduler.census().held_by) == {"seq:ra#1", "seq:rc#1"}, "a refusal leaves nothing behind"


def test_a_reservation_for_the_whole_pool_fits_when_the_pool_is_empty() -> None:
    driver = EngineDriver(num_blocks=8)
    driver.handle(Reserve(make_spec("a", range(30), 3)))
    assert len(driver["a"].reserved.block_ids) == 8


def test_reservations_do_not_starve_the_oldest_waiting_sequence() -> None:
    driver = EngineDriver(num_blocks=8, max_sequences=3)
    driver.handle(Reserve(make_spec("a", range(12), 2)))
    driver.handle(Generate(make_spec("big", range(100, 124), 3)))
    assert driver.step() is None, "no room for it yet"
    (refused,) = driver.handle(Reserve(make_spec("b", range(200, 204), 2)))
    assert refused.error_kind == "Overloaded"
    driver.handle(Abort(key("a"), "test"))
    driver.run_until_idle()
    assert driver["big"].tokens == lone_run(make_spec("big", range(100, 124), 3), VOCAB)


def test_a_reservation_does_not_take_the_slot_that_the_oldest_waiting_sequence_gets_next() -> None:
    driver = EngineDriver(max_sequences=2)
    for name, max_new_tokens in (("a", 1), ("b", 9), ("c", 3)):
        driver.handle(Generate(make_spec(name, range(5), max_new_tokens)))
    driver.step()
    assert driver["a"].ended is not None and key("c") not in driver.outcomes, "one slot is free, and c waits for it"
    (refused,) = driver.handle(Reserve(make_spec("r", range(5), 9)))
    assert refused.error_kind == "Overloaded" and "1 of 2 sequences are active, 1 wait" in refused.message
    driver.run_until_idle()
    assert driver["c"].tokens == lone_run(make_spec("c", range(5), 3), VOCAB)


def test_a_reservation_leaves_a_running_sequence_its_very_last_block() -> None:
    driver = EngineDriver(num_blocks=4)
    driver.handle(Generate(make_spec("a", range(4), 4)))
    driver.step()
    (refused,) = driver.handle(Reserve(make_spec("b", range(100, 108), 9)))
    assert refused.error_kind == "Overloaded", "three are available: two, one to grow, and one that the next step of a needs"
    driver.step()
    driver.handle(Reserve(make_spec("c", range(100, 104), 3)))
    assert driver["c"].reserved is not None
    driver.run_until_idle()
    assert driver["a"].tokens == lone_run(make_spec("a", range(4), 4), VOCAB) and driver.scheduler.num_preemptions == 0


def test_two_commits_of_one_sequence_are_a_bug() -> None:
    driver = EngineDriver()
    driver.handle(Reserve(make_spec("a", range(4), 5)))
    driver.handle(Commit(key("a"), 5))
    with pytest.raises(AssertionError, match="committed while it is running"):
        driver.handle(Commit(key("a"), 5))
