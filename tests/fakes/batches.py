"""Writes a StepBatch from lists and whole block tables, for tests that have no scheduler.

Row s of the runner's tables becomes sequence s, told anew with each batch; `StepBatch` in engine/batch.py says what the numbers mean.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from engine.batch import SampleRow, StepBatch, TableUpdate


def make_batch(
    token_ids: Iterable[int],
    positions: Iterable[int],
    slot_mapping: Iterable[int],
    query_starts: Iterable[int],
    context_lens: Iterable[int],
    block_tables: Sequence[Sequence[int]],
    sample_rows: Iterable[SampleRow],
) -> StepBatch:
    return StepBatch(
        token_ids=array("q", token_ids),
        positions=array("q", positions),
        slot_mapping=array("q", slot_mapping),
        query_starts=array("i", query_starts),
        context_lens=array("i", context_lens),
        table_rows=array("i", range(len(block_tables))),
        table_updates=[TableUpdate(row, 0, tuple(table)) for row, table in enumerate(block_tables)],
        sample_rows=list(sample_rows),
    )
