"""Claims about the oracle itself: each kind of damage to the KV changes the output or is reported; no test with it is blind."""

from __future__ import annotations

import dataclasses
from array import array

import pytest

from common.types import SamplingParams
from engine.batch import SampleRow, StepBatch, TableUpdate
from tests.fakes.batches import make_batch
from tests.fakes.engine_driver import make_spec
from tests.fakes.kv_oracle import FakeRunner, copy_blocks, lone_run

SPEC = make_spec("a", range(10), 2)
FIRST = lone_run(SPEC, 1 << 30)[0]


def whole_prompt(table=(5, 2, 7), token_ids=tuple(range(10))) -> StepBatch:
    positions = list(range(10))
    slots = [table[position // 4] * 4 + position % 4 for position in positions]
    return make_batch(token_ids, positions, slots, [0, 10], [10], [table], [SampleRow(0, 0, SamplingParams())])


def sample_again(runner: FakeRunner, table=(5, 2, 7)) -> int:
    """Computes the last prompt token once more and samples: reads all of the context through the table."""
    slot = table[2] * 4 + 1
    batch = make_batch([9], [9], [slot], [0, 1], [10], [table], [SampleRow(0, 0, SamplingParams())])
    return runner.run(batch).token_ids[0]


@pytest.fixture
def runner() -> FakeRunner:
    runner = FakeRunner(8, 4, 1 << 30)
    assert runner.run(whole_prompt()).token_ids == [FIRST]
    assert sample_again(runner) == FIRST
    return runner


def test_reading_a_freed_block_is_reported(runner: FakeRunner) -> None:
    runner.poison([2])
    with pytest.raises(AssertionError, match="not written since it was freed"):
        sample_again(runner)


def test_a_block_of_another_sequence_changes_the_output(runner: FakeRunner) -> None:
    runner.run(whole_prompt((1, 3, 4), token_ids=range(50, 60)))
    assert sample_again(runner, (5, 3, 7)) != FIRST
    assert sample_again(runner) == FIRST


def test_swapped_blocks_change_the_output(runner: FakeRunner) -> None:
    assert sample_again(runner, (2, 5, 7)) != FIRST


def test_one_flipped_bit_changes_the_output(runner: FakeRunner) -> None:
    runner.slots[5 * 4 + 3] ^= 1
    assert sample_again(runner) != FIRST


def test_equal_tokens_behind_another_past_have_other_kv(runner: FakeRunner) -> None:
    before = runner.block(7)
    runner.run(whole_prompt(token_ids=[99, *range(1, 10)]))
    assert runner.block(7) != before


def test_the_token_index_the_seed_and_the_choice_change_the_output() -> None:
    rows = [
        SampleRow(0, 0, SamplingParams()),
        SampleRow(0, 1, SamplingParams()),
        SampleRow(0, 0, SamplingParams(seed=1)),
        SampleRow(0, 0, SamplingParams(choice=1)),
    ]
    outputs = {FakeRunner(8, 4, 1 << 30).run(dataclasses.replace(whole_prompt(), sample_rows=[row])).token_ids[0] for row in rows}
    assert len(outputs) == len(rows)


def test_copied_blocks_give_the_same_output_elsewhere(runner: FakeRunner) -> None:
    other = FakeRunner(8, 4, 1 << 30)
    copy_blocks(runner, (5, 2, 7), other, (0, 6, 1))
    assert sample_again(other, (0, 6, 1)) == FIRST


@pytest.mark.parametrize(
    "damage",
    [
        {"slot_mapping": array("q", [0] * 10)},
        {"positions": array("q", range(1, 11))},
        {"query_starts": array("i", [0, 9])},
        {"context_lens": array("i", [11])},
        {"table_updates": [TableUpdate(0, 0, (5, 2))]},
        {"table_updates": [TableUpdate(0, 0, (5, 2, 9))]},
        {"table_updates": [TableUpdate(0, 0, (2, 5, 7))]},
        {"table_updates": [TableUpdate(0, 1, (5, 2, 7))]},
        {"table_updates": [TableUpdate(0, 0, (5, 2, 7)), TableUpdate(0, 0, (5, 2, 7))]},
        {"sample_rows": [SampleRow(1, 0, SamplingParams())]},
    ],
)
def test_a_batch_of_the_wrong_shape_is_reported(damage) -> None:
    with pytest.raises(AssertionError):
        FakeRunner(8, 4).run(dataclasses.replace(whole_prompt(), **damage))
