"""Writes the scheduled tokens of the sequences of one step behind each other, as the plain numbers of a StepBatch.

It reads sequences and changes none; what is scheduled is the scheduler's decision. Slots are `block_id * block_size + offset`,
positions are absolute; a decode costs the same however long its sequence is.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch import SampleRow, StepBatch
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`num_tokens` of a sequence from its first uncomputed one on; `is_sampled` if that catches up with the known tokens."""

    sequence: Sequence
    num_tokens: int
    is_sampled: bool


class StepBuilder:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._batch = StepBatch([], [], [], [0], [], [], [])
        self.scheduled: list[Scheduled] = []

    @property
    def num_tokens(self) -> int:
        return self._batch.num_tokens

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedules the next `num_tokens` of a sequence whose blocks cover them."""
        start, end, size = sequence.num_computed, sequence.num_computed + num_tokens, self._block_size
        assert 0 < num_tokens <= sequence.num_uncomputed, f"{sequence.key}: {num_tokens} of {sequence.num_uncomputed} tokens"
        assert end <= len(sequence.block_ids) * size, f"{sequence.key}: {end} tokens on {len(sequence.block_ids)} blocks"
        batch = self._batch
        if num_tokens == 1:
            batch.token_ids.append(sequence.token_ids[start])
            batch.positions.append(start)
            batch.slot_mapping.append(sequence.block_ids[start // size] * size + start % size)
        else:
            batch.token_ids.extend(sequence.token_ids[start:end])
            batch.positions.extend(range(start, end))
            for block_index in range(start // size, (end - 1) // size + 1):
                first_slot = sequence.block_ids[block_index] * size
                first_offset = max(start - block_index * size, 0)
                end_offset = min(end - block_index * size, size)
                batch.slot_mapping.extend(range(first_slot + first_offset, first_slot + end_offset))
        batch.query_starts.append(len(batch.token_ids))
        batch.context_lens.append(end)
        batch.block_tables.append(sequence.block_table())
        is_sampled = end == len(sequence.token_ids)
        if is_sampled:
            row = SampleRow(
                len(self.scheduled), sequence.next_token_index, sequence.spec.sampling, sequence.forbidden_token_ids()
            )
            batch.sample_rows.append(row)
        self.scheduled.append(Scheduled(sequence, num_tokens, is_sampled))

    def build(self) -> StepBatch | None:
        """The step's batch; None if nothing was scheduled."""
        return self._batch if self.scheduled else None
