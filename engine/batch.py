"""One step's work as plain numbers: the scheduler writes it, the model runner reads it. Pure; no torch.

A step is a ragged batch: the scheduled tokens of all sequences behind each other. Letters as everywhere: T tokens in the
step, S sequences. Whether a sequence decodes one token or computes a prompt chunk makes no difference here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.types import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A sequence whose next token is sampled in this step. `sequence_index` is its row among the S sequences.

    `token_index` is the index of the sampled completion token. `forbidden_token_ids` must not be sampled (stop tokens
    before `min_new_tokens`).
    """

    sequence_index: int
    token_index: int
    sampling: SamplingParams
    forbidden_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The work of one step.

    token_ids [T], positions [T] (absolute, from 0), slot_mapping [T] (`block_id * block_size + offset`),
    query_starts [S+1] (cumulative first rows), context_lens [S] (tokens whose KV exists after this step),
    block_tables [S] (block ids that cover at least context_lens[s] tokens), sample_rows (at most S, increasing
    sequence_index). The last row of a sequence is the one sampled from.
    """

    token_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    query_starts: list[int]
    context_lens: list[int]
    block_tables: list[tuple[int, ...]]
    sample_rows: list[SampleRow]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)


class ModelRunner(Protocol):
    """Runs one step on the device: writes KV of all T tokens, returns one token id per sample row, in that order."""

    def run(self, batch: StepBatch) -> list[int]: ...
