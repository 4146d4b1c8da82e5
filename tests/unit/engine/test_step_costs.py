"""Claims about what a step costs, as counts of operations: never times, which say little on a busy machine."""

from __future__ import annotations

import numpy as np
import pytest

from engine.batch import TableUpdate
from engine.block_allocator import BlockAllocator
from engine.block_tables import BlockTables
from engine.commands import Abort, Generate, Sampled
from engine.prefix_index import PrefixIndex
from engine.scheduler import SchedulerSettings
from engine.sequence_blocks import SequenceBlocks
from engine.waiting_line import WaitingLine
from tests.fakes.engine_driver import EngineDriver, key, make_spec
from tests.fakes.kv_oracle import lone_run


def many_blocks(**settings) -> EngineDriver:
    return EngineDriver(num_blocks=2048, token_budget=2048, max_sequences=256, waiting_max=512, **settings)


@pytest.mark.parametrize("num_prompt", [5, 400])
def test_a_step_tells_the_runner_of_new_blocks_only_whatever_the_context(num_prompt: int) -> None:
    driver = many_blocks()
    for index in range(3):
        driver.handle(Generate(make_spec(index, [index, *range(7, 6 + num_prompt)], 40)))
    driver.step()
    num_entries = driver.runner.num_entries_written
    assert num_entries == 3 * -(-num_prompt // 4), "the prompts' blocks, each once"
    for _ in range(30):
        held_before = driver.scheduler.census().held
        driver.step()
        num_new = driver.scheduler.census().held - held_before
        assert sum(len(update.block_ids) for update in driver.last_batch.table_updates) == num_new
        num_entries += num_new
    assert driver.runner.num_entries_written == num_entries


def test_a_preempted_sequence_is_told_anew_and_rows_are_reused() -> None:
    driver = EngineDriver(num_blocks=9, token_budget=32, max_sequences=4)
    specs = [make_spec(index, range(index * 20, index * 20 + 6), 14) for index in range(4)]
    for spec in specs:
        driver.handle(Generate(spec))
    driver.run_until_idle()
    assert driver.scheduler.num_preemptions > 0, "the pool is too large for this test"
    assert max(driver.runner.tables) < 4, "more table rows than sequences that run at a time"
    for spec in specs:
        assert driver[spec.key].tokens == lone_run(spec, 97)


class Counting:
    """Counts the calls of one method of a class."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.num_calls = 0
        original = getattr(owner, name)

        def counted(*arguments):
            self.num_calls += 1
            return original(*arguments)

        monkeypatch.setattr(owner, name, counted)


def test_admission_looks_at_no_other_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for num_running in (2, 100):
        driver = many_blocks()
        for index in range(num_running):
            driver.handle(Generate(make_spec(index, [index, 3, 4], 40)))
        driver.step()
        driver.handle(Generate(make_spec("new", range(50, 58), 9)))
        with monkeypatch.context() as patch:
            counting = Counting(patch, SequenceBlocks, "_growth_at")
            sequence = driver.scheduler._waiting.head()
            assert driver.scheduler._blocks.admit(sequence, driver.scheduler._headroom(sequence))
            calls.append(counting.num_calls)
    assert calls[0] == calls[1] > 0


def test_admission_hashes_the_hit_and_one_block_more(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = many_blocks()
    driver.handle(Generate(make_spec("a", range(16), 2)))
    driver.run_until_idle()
    driver.handle(Generate(make_spec("b", [*range(16), *range(100, 900)], 2)))
    counting = Counting(monkeypatch, PrefixIndex, "child")
    sequence = driver.scheduler._waiting.head()
    assert driver.scheduler._blocks.admit(sequence, 0)
    assert sequence.num_cached_tokens == 16 and counting.num_calls == 5


def test_a_hold_costs_the_same_however_many_share_the_block() -> None:
    allocator = BlockAllocator(4)
    (block_id,) = allocator.allocate("first", 1)
    for index in range(1000):
        allocator.share(f"other-{index}", [block_id])
    stored = [value for name in ("_num_holds", "_content", "_cached") for value in getattr(allocator, name).values()]
    assert stored == [1001], "per block there is a number, not a list of holders"
    for index in range(1000):
        assert allocator.release(f"other-{index}") == 0
    assert allocator.release("first") == 1


def test_the_head_of_a_long_line_is_found_at_once() -> None:
    driver = many_blocks()
    driver.scheduler._waiting = line = WaitingLine()
    for index in range(400):
        driver.handle(Generate(make_spec(index, [index], 2)))
    seen = []
    while (head := line.head()) is not None:
        seen.append(head.key)
        line.remove(head)
    assert seen == [key(index) for index in range(400)] and line.num_tokens == 0


@pytest.mark.parametrize("num_prompts", [1, 4, 7])
def test_several_prompts_are_prefilled_in_one_step_by_token_budget(num_prompts: int) -> None:
    driver = EngineDriver(num_blocks=128, token_budget=40, prefill_tokens_max=20)
    for index in range(num_prompts):
        driver.handle(Generate(make_spec(index, range(index * 20, index * 20 + 5), 3)))
    driver.step()
    assert driver.last_batch.num_sequences == min(num_prompts, 4) and driver.last_batch.num_tokens == 5 * min(num_prompts, 4)
    assert len(driver.last_batch.sample_rows) == min(num_prompts, 4), "whole prompts, each with its first token"
    driver.run_until_idle()
    for index in range(num_prompts):
        assert driver[index].tokens == lone_run(make_spec(index, range(index * 20, index * 20 + 5), 3), 97)


def test_a_chunk_is_smaller_beside_decodes_and_no_decode_misses_a_step() -> None:
    driver = EngineDriver(num_blocks=256, token_budget=64, prefill_tokens_max=48, prefill_tokens_beside_max=6)
    driver.handle(Generate(make_spec("first", range(100), 30)))
    driver.step()
    assert driver.last_batch.num_tokens == 48, "nobody decodes: the large bound"
    driver.step()
    driver.step()
    assert len(driver["first"].tokens) == 1
    driver.handle(Generate(make_spec("second", range(200, 300), 3)))
    num_beside = 0
    while key("second") not in driver.outcomes:
        events = driver.step()
        assert driver.last_batch.num_tokens <= 1 + 6
        assert key("first") in [event.key for event in events if isinstance(event, Sampled)]
        num_beside += 1
    assert num_beside == 17, "100 tokens, 6 in each step"
    driver.handle(Abort(key("first"), "test"))
    driver.run_until_idle()
    assert driver["second"].tokens == lone_run(make_spec("second", range(200, 300), 3), 97)


@pytest.mark.parametrize("beside", [0, 9])
def test_a_bound_beside_decodes_that_contradicts_the_others_is_refused(beside: int) -> None:
    with pytest.raises(ValueError, match=f"prefill_tokens_beside_max {beside}"):
        SchedulerSettings(4, 16, 8, 4, 100, 4, prefill_tokens_beside_max=beside)


def test_block_tables_keep_rows_grow_and_forget_what_a_row_had() -> None:
    tables = BlockTables()
    tables.apply([TableUpdate(0, 0, (5, 6)), TableUpdate(2, 0, (7,))])
    tables.apply([TableUpdate(0, 2, (8,)), TableUpdate(40, 0, tuple(range(1, 300)))])
    rows = np.array([2, 0, 40], dtype=np.int32)
    assert tables.select(rows, 4).tolist() == [[7, 0, 0, 0], [5, 6, 8, 0], [1, 2, 3, 4]]
    assert tables.select(rows, 299)[2].tolist() == list(range(1, 300))
    tables.apply([TableUpdate(0, 0, (9,))])
    selected = tables.select(rows, 4)
    assert selected[1].tolist() == [9, 0, 0, 0] and selected.flags["C_CONTIGUOUS"]
    assert tables.num_entries_written == 2 + 1 + 1 + 299 + 1


def test_the_engine_counts_each_computed_token_once_and_hits_apart() -> None:
    driver = EngineDriver(num_blocks=64, token_budget=16)
    driver.handle(Generate(make_spec("a", range(20), 5)))
    driver.run_until_idle()
    counts = driver.scheduler.counts()
    assert (counts.num_prompt_tokens, counts.num_decode_tokens, counts.num_prefix_hit_tokens) == (20, 4, 0)
    assert counts.num_steps == driver.runner.num_steps == 2 + 4
    driver.handle(Generate(make_spec("b", range(20), 5)))
    driver.run_until_idle()
    counts = driver.scheduler.counts()
    assert (counts.num_prompt_tokens, counts.num_decode_tokens, counts.num_prefix_hit_tokens) == (24, 8, 16)
