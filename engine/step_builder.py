"""Writes the scheduled tokens of the sequences of one step behind each other, as the plain numbers of a StepBatch.

It reads sequences and changes nothing of them but how much of their block table the runner has been told; what is scheduled is the
scheduler's decision. Slots are `block_id * block_size + offset`, positions are absolute; a decode costs the same however long its
sequence is.
"""

from __future__ import annotations

from engine.batch import PromptRows, SampleRow, StepBatch, TableUpdate
from engine.sequence import Sequence


class StepBuilder:
    """`scheduled` and `num_scheduled` run parallel: the sequences of the step and how many tokens each computes in it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._batch = StepBatch()
        self.scheduled: list[Sequence] = []
        self.num_scheduled: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self._batch.token_ids)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedules the next `num_tokens` of a sequence whose blocks cover them; its next token is sampled if that is all."""
        batch, size, block_ids, known = self._batch, self._block_size, sequence.block_ids, sequence.token_ids
        start = sequence.num_computed
        end = start + num_tokens
        assert num_tokens > 0 and end <= len(known), f"{sequence.key}: {num_tokens} of {len(known) - start} tokens"
        assert end <= len(block_ids) * size, f"{sequence.key}: {end} tokens on {len(block_ids)} blocks"
        if num_tokens == 1:
            batch.token_ids.append(known[start])
            batch.positions.append(start)
            batch.slot_mapping.append(block_ids[start // size] * size + start % size)
        else:
            batch.token_ids.extend(known[start:end])
            batch.positions.extend(range(start, end))
            for block_index in range(start // size, (end - 1) // size + 1):
                first_slot = block_ids[block_index] * size
                first_offset = max(start - block_index * size, 0)
                end_offset = min(end - block_index * size, size)
                batch.slot_mapping.extend(range(first_slot + first_offset, first_slot + end_offset))
        batch.query_starts.append(len(batch.token_ids))
        batch.context_lens.append(end)
        batch.table_rows.append(sequence.table_row)
        num_tabled = sequence.num_tabled_blocks
        if num_tabled < len(block_ids):
            batch.table_updates.append(TableUpdate(sequence.table_row, num_tabled, tuple(block_ids[num_tabled:])))
            sequence.num_tabled_blocks = len(block_ids)
        if sequence.rates_prompt:
            self._add_prompt_rows(sequence, start, end)
        if end == len(known):
            spec = sequence.spec
            token_index, stop = end - spec.num_prompt_tokens, spec.stop
            forbidden = stop.stop_token_ids if token_index < stop.min_new_tokens else ()
            batch.sample_rows.append(SampleRow(len(self.scheduled), token_index, spec.sampling, forbidden, sequence.extras))
        self.scheduled.append(sequence)
        self.num_scheduled.append(num_tokens)

    def _add_prompt_rows(self, sequence: Sequence, start: int, end: int) -> None:
        """The tokens [start, end) have just been added: the row of each rates the token behind it, as far as that is prompt and new."""
        first, last = max(start, sequence.num_rated), min(end, sequence.spec.num_prompt_tokens - 1)
        if first < last:
            row = len(self._batch.token_ids) - (end - first)
            token_ids = tuple(sequence.token_ids[first + 1 : last + 1])
            num_logprobs = sequence.spec.num_prompt_logprobs or 0
            self._batch.prompt_rows.append(PromptRows(len(self.scheduled), row, token_ids, num_logprobs))

    def build(self) -> StepBatch | None:
        """The step's batch; None if nothing was scheduled."""
        return self._batch if self.scheduled else None
