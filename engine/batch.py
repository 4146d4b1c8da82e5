"""One step's work as plain numbers: the scheduler writes it, the model runner reads it. Pure; no torch.

A step is a ragged batch: the scheduled tokens of all sequences behind each other. Letters as everywhere: T tokens in the
step, S sequences. Whether a sequence decodes one token or computes a prompt chunk makes no difference here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from common.types import SamplingParams, TokenLogprobs
from engine.token_counts import TokenCounts


@dataclass(frozen=True, slots=True)
class RowExtras:
    """What only some sequences need of sampling; made once per sequence, so that others pay nothing for it.

    `token_ids` are all known tokens of the sequence (its own list: read it, keep nothing), the completion's from
    `num_prompt_tokens` on. `num_logprobs`: alternatives to report, None for no logprobs. `counts` only where penalties want them.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_logprobs: int | None = None
    counts: TokenCounts | None = None


class SampleRow(NamedTuple):
    """A sequence whose next token is sampled in this step. `sequence_index` is its row among the S sequences.

    `token_index` is the index of the sampled completion token. `forbidden_token_ids` must not be sampled (stop tokens
    before `min_new_tokens`). One is made per token: a named tuple, because a frozen dataclass takes three times as long.
    """

    sequence_index: int
    token_index: int
    sampling: SamplingParams
    forbidden_token_ids: tuple[int, ...] = ()
    extras: RowExtras | None = None


class PromptRows(NamedTuple):
    """Prompt tokens whose logprobs are wanted: the logits of row `first_row + i` of the T tokens rate `token_ids[i]`."""

    sequence_index: int
    first_row: int
    token_ids: tuple[int, ...]
    num_logprobs: int


class StepResults(NamedTuple):
    """What a step gives back: one token id per sample row; logprobs of those rows (None where not asked for; empty if no row did);
    one tuple per entry of `prompt_rows`."""

    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs | None] = ()
    prompt_logprobs: Sequence[tuple[TokenLogprobs, ...]] = ()


class TableUpdate(NamedTuple):
    """New entries of one row of the runner's block tables: `block_ids` from index `first_block_index` on.

    Index 0 begins a new table and forgets what the row had; any other index is the length that the table had before.
    """

    row: int
    first_block_index: int
    block_ids: tuple[int, ...]


def _int64() -> array[int]:
    return array("q")


def _int32() -> array[int]:
    return array("i")


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The work of one step.

    token_ids [T], positions [T] (absolute, from 0), slot_mapping [T] (`block_id * block_size + offset`): int64.
    query_starts [S+1] (cumulative first rows), context_lens [S] (tokens whose KV exists after this step), table_rows [S]: int32.
    sample_rows: at most S, increasing sequence_index. The last row of a sequence is the one sampled from.
    prompt_rows: rows beside those whose logits are wanted, for logprobs of the prompt.

    These are machine arrays: a runner views them (`np.frombuffer`, `torch.frombuffer`) and converts nothing; a view keeps the array
    from growing, and the batch is complete when it is handed out.

    Block tables are state of the *runner*, one row per sequence, because a step must not cost O(context) to describe. A runner
    first applies `table_updates`, in order, to tables that it keeps from step to step (engine/block_tables.py does it for a CPU;
    elsewhere they may lie on the device); then row `table_rows[s]` holds the blocks that cover context_lens[s] tokens. Each batch
    must therefore be run exactly once, in order. Entries written in a step are the blocks that are new in it, no more.
    """

    token_ids: array[int] = field(default_factory=_int64)
    positions: array[int] = field(default_factory=_int64)
    slot_mapping: array[int] = field(default_factory=_int64)
    query_starts: array[int] = field(default_factory=lambda: array("i", (0,)))
    context_lens: array[int] = field(default_factory=_int32)
    table_rows: array[int] = field(default_factory=_int32)
    table_updates: list[TableUpdate] = field(default_factory=list)
    sample_rows: list[SampleRow] = field(default_factory=list)
    prompt_rows: list[PromptRows] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)


class ModelRunner(Protocol):
    """Runs one step on the device: writes KV of all T tokens, samples one token per sample row, in that order."""

    def run(self, batch: StepBatch) -> StepResults: ...
