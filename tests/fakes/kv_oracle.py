"""The KV oracle: a fake model whose next token is a hash of everything it reads through the block table.

Each slot of the fake cache stores a 64-bit link that hashes the link at the position before (read through the block table, as a
real layer reads its past), the token and the position; the next token hashes all links of the context and the sample row. So a
misrouted, lost, stale, doubled or early-freed block changes the output, and comparing it with `lone_run` finds the whole class.
The fake has no tensors: a block is `block_size` words of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from common.types import SamplingParams, TokenLogprobs
from engine.batch import PromptRows, SampleRow, StepBatch, StepResults
from engine.commands import SequenceSpec
from kvtransfer.copier import DIGEST_BYTES

WORD_BYTES = 8
POISON = int.from_bytes(b"poisoned", "little")
"""What freed slots contain. Reading one is reported at once, with its place."""


def _hash(*words: int) -> int:
    packed = b"".join(word.to_bytes(WORD_BYTES, "little") for word in words)
    return int.from_bytes(blake2b(packed, digest_size=WORD_BYTES).digest(), "little")


def link(previous: int, token_id: int, position: int) -> int:
    """The fake KV of one token: it depends on the whole past, as the KV of a real layer does. Never equals POISON in practice."""
    return _hash(previous, token_id, position)


def sample(links: Iterable[int], token_index: int, sampling: SamplingParams, forbidden: Sequence[int], vocab_size: int) -> int:
    """The next token for a context of these links, in order; a pure function, as the keyed sampler is."""
    state = 0
    for word in links:
        state = _hash(state, word)
    state = _hash(state, token_index, sampling.seed, sampling.choice)
    for attempt in range(vocab_size):
        token_id = (state + attempt) % vocab_size
        if token_id not in forbidden:
            return token_id
    raise ValueError(f"all {vocab_size} tokens are forbidden")


def lone_run(spec: SequenceSpec, vocab_size: int) -> list[int]:
    """The completion tokens behind `spec.token_ids` that the sequence must get, whoever computes it and beside whomever."""
    links: list[int] = []
    known = list(spec.token_ids)
    while True:
        for position in range(len(links), len(known)):
            links.append(link(links[-1] if links else 0, known[position], position))
        token_index = len(known) - spec.num_prompt_tokens
        forbidden = spec.stop.stop_token_ids if token_index < spec.stop.min_new_tokens else ()
        known.append(sample(links, token_index, spec.sampling, forbidden, vocab_size))
        is_stop = known[-1] in spec.stop.stop_token_ids and token_index >= spec.stop.min_new_tokens
        if is_stop or token_index + 1 == spec.stop.max_new_tokens:
            return known[len(spec.token_ids) :]


@dataclass(slots=True)
class FakeRunner:
    """A ModelRunner over the fake cache that also implements BlockCopier; poisoned from the start.

    `run` checks the shape of each batch (StepBatch's docstring), so a scheduler's mistake fails here even if the tokens agree.
    """

    num_blocks: int
    block_size: int
    vocab_size: int = 97
    num_steps: int = 0
    slots: list[int] = field(init=False)
    tables: dict[int, list[int]] = field(default_factory=dict)
    num_entries_written: int = 0

    def __post_init__(self) -> None:
        self.slots = [POISON] * (self.num_blocks * self.block_size)

    # ---- ModelRunner ---------------------------------------------------------------------------------------------

    def run(self, batch: StepBatch) -> StepResults:
        self._update_tables(batch)
        self._check_shape(batch)
        self.num_steps += 1
        for row in range(batch.num_sequences):
            for index in range(batch.query_starts[row], batch.query_starts[row + 1]):
                position = batch.positions[index]
                previous = self._read(batch, row, position - 1) if position else 0
                self.slots[batch.slot_mapping[index]] = link(previous, batch.token_ids[index], position)
        tokens = [self._sample(batch, row) for row in batch.sample_rows]
        return StepResults(tokens, prompt_logprobs=[self._rate(batch, rows) for rows in batch.prompt_rows])

    def _rate(self, batch: StepBatch, rows: PromptRows) -> tuple[TokenLogprobs, ...]:
        """Not likelihoods, but what a test can check: minus the position of the row, and the token that it rates."""
        start, end = batch.query_starts[rows.sequence_index : rows.sequence_index + 2]
        indexes = range(rows.first_row, rows.first_row + len(rows.token_ids))
        assert start <= indexes[0] and indexes[-1] < end, f"prompt rows {indexes} of tokens {start} to {end}"
        for index, token_id in zip(indexes[:-1], rows.token_ids, strict=False):
            assert batch.token_ids[index + 1] == token_id, f"row {index} rates another token than the one behind it"
        return tuple(
            TokenLogprobs(-float(batch.positions[index]), ((token_id, 0.0),))
            for index, token_id in zip(indexes, rows.token_ids, strict=True)
        )

    def _sample(self, batch: StepBatch, row: SampleRow) -> int:
        context_len = batch.context_lens[row.sequence_index]
        links = (self._read(batch, row.sequence_index, position) for position in range(context_len))
        return sample(links, row.token_index, row.sampling, row.forbidden_token_ids, self.vocab_size)

    def _update_tables(self, batch: StepBatch) -> None:
        assert len({update.row for update in batch.table_updates}) == len(batch.table_updates), "a row is updated twice"
        for row, first, block_ids in batch.table_updates:
            table = self.tables.setdefault(row, [])
            assert block_ids, f"an empty update of row {row}"
            assert first in (0, len(table)), f"row {row} has {len(table)} entries and gets more from {first} on"
            table[first:] = block_ids
            self.num_entries_written += len(block_ids)

    def table(self, batch: StepBatch, sequence_index: int) -> list[int]:
        """The block table of one sequence of a batch."""
        return self.tables[batch.table_rows[sequence_index]]

    def _slot(self, table: Sequence[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, batch: StepBatch, row: int, position: int) -> int:
        slot = self._slot(self.table(batch, row), position)
        word = self.slots[slot]
        assert word != POISON, f"row {row} reads position {position} from slot {slot}, which is not written since it was freed"
        return word

    def _check_shape(self, batch: StepBatch) -> None:
        num_tokens, num_sequences = batch.num_tokens, batch.num_sequences
        assert num_tokens > 0, "an empty step"
        assert len(batch.positions) == len(batch.slot_mapping) == num_tokens
        assert len(batch.query_starts) == num_sequences + 1 and len(batch.table_rows) == num_sequences
        assert batch.query_starts[0] == 0 and batch.query_starts[-1] == num_tokens
        assert len(set(batch.table_rows)) == num_sequences, f"two sequences share a table row: {batch.table_rows}"
        assert len(set(batch.slot_mapping)) == num_tokens, "two tokens of one step are written to one slot"
        for row, (start, end) in enumerate(zip(batch.query_starts, batch.query_starts[1:], strict=False)):
            context_len, table = batch.context_lens[row], self.table(batch, row)
            assert start < end, f"row {row} has no token"
            assert list(batch.positions[start:end]) == list(range(context_len - (end - start), context_len)), (
                f"positions of row {row}"
            )
            assert len(table) * self.block_size >= context_len, f"row {row}: {context_len} tokens on {len(table)} blocks"
            assert len(set(table)) == len(table), f"row {row} has a block twice: {table}"
            assert all(0 <= block_id < self.num_blocks for block_id in table), f"row {row}: {table}"
            expected = [self._slot(table, position) for position in batch.positions[start:end]]
            assert list(batch.slot_mapping[start:end]) == expected, f"slots of row {row}"
        rows = [row.sequence_index for row in batch.sample_rows]
        assert rows == sorted(set(rows)) and all(0 <= row < num_sequences for row in rows), f"sample rows {rows}"

    # ---- BlockCopier ---------------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        return self.block_size * WORD_BYTES

    def gather(self, block_ids: Sequence[int], slab: memoryview) -> bytes:
        words = (word for block_id in block_ids for word in self.block(block_id))
        payload = b"".join(word.to_bytes(WORD_BYTES, "little") for word in words)
        slab[: len(payload)] = payload
        return _digest(payload)

    def scatter(self, slab: memoryview, block_ids: Sequence[int]) -> bytes:
        payload = bytes(slab[: len(block_ids) * self.block_bytes])
        words = [int.from_bytes(payload[at : at + WORD_BYTES], "little") for at in range(0, len(payload), WORD_BYTES)]
        for index, block_id in enumerate(block_ids):
            self._write(block_id, words[index * self.block_size : (index + 1) * self.block_size])
        return _digest(payload)

    # ---- for tests -----------------------------------------------------------------------------------------------

    def block(self, block_id: int) -> list[int]:
        """The words of one block."""
        return self.slots[block_id * self.block_size : (block_id + 1) * self.block_size]

    def poison(self, block_ids: Iterable[int]) -> None:
        """What a test does with the allocator's free blocks after each step: whoever still reads one is found out."""
        for block_id in block_ids:
            self._write(block_id, [POISON] * self.block_size)

    def _write(self, block_id: int, words: Sequence[int]) -> None:
        assert 0 <= block_id < self.num_blocks, f"block {block_id} of {self.num_blocks}"
        self.slots[block_id * self.block_size : (block_id + 1) * self.block_size] = words


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=DIGEST_BYTES).digest()


def copy_blocks(source: FakeRunner, source_ids: Sequence[int], target: FakeRunner, target_ids: Sequence[int]) -> None:
    """What a handoff does in the end: these blocks of one cache to those of another, through a slab, verified."""
    assert len(source_ids) == len(target_ids), f"{len(source_ids)} blocks onto {len(target_ids)}"
    slab = memoryview(bytearray(source.block_bytes * len(source_ids)))
    sent, received = source.gather(source_ids, slab), target.scatter(slab, target_ids)
    assert sent == received, "the copy differs from what was gathered"
