"""Gives sequences their blocks: prefix hits shared, the rest allocated, all or nothing, and takes them back.

Joins the allocator, the prefix index and the block table of a sequence, so that nobody else does block arithmetic. A sequence
gets the blocks of all its known tokens at once and grows by one block at a time while it decodes; it must not know queues or
budgets. All numbers are blocks unless a name says tokens; `table_row` names a row of the model runner's block tables.

    positions   0 ........ cached ........ computed ........ known       KV of the last known token is computed by the next step
    blocks      [ shared hits ][ allocated at admission ....... ][ +1 whenever `computed` reaches the end of the table ]
"""

from __future__ import annotations

from collections.abc import Iterable

from common.ids import AttemptKey
from engine.block_allocator import BlockAllocator
from engine.prefix_index import PrefixIndex
from engine.sequence import Kind, Sequence, State, handoff_owner, num_blocks_for


class SequenceBlocks:
    """Blocks of the sequences of one engine. `growth_blocks` is the room to grow that admission leaves each active sequence."""

    def __init__(self, allocator: BlockAllocator, prefix_index: PrefixIndex, growth_blocks: int) -> None:
        if growth_blocks < 0:
            raise ValueError(f"growth_blocks is {growth_blocks}, it cannot be negative")
        self.allocator = allocator
        self.block_size = prefix_index.block_size
        self._index = prefix_index
        self._growth_blocks = growth_blocks
        self.num_kept_for_growth = 0
        """Sum of `growth_of` over the sequences that have blocks, kept up to date: admission must not cost O(sequences)."""
        self.num_hit_tokens = 0
        self._free_rows: list[int] = []
        self._num_rows = 0

    def num_final(self, sequence: Sequence) -> int:
        """Blocks of the sequence when it has all tokens that it may ever have."""
        return num_blocks_for(sequence.num_tokens_max - 1, self.block_size)

    def num_known(self, sequence: Sequence) -> int:
        return num_blocks_for(len(sequence.token_ids), self.block_size)

    def growth_of(self, sequence: Sequence) -> int:
        """Blocks that are kept back for the growth of a sequence; none that it will never need, so one alone always fits."""
        return self._growth_at(sequence, len(sequence.block_ids) or self.num_known(sequence))

    def _growth_at(self, sequence: Sequence, num_blocks: int) -> int:
        return max(0, min(self._growth_blocks, self.num_final(sequence) - num_blocks))

    def admit(self, sequence: Sequence, headroom: int) -> bool:
        """Gives a sequence the blocks of all known tokens if `headroom` blocks stay available besides; else False, no change.

        At least one token is left to compute, because the next token is sampled from its logits; a sequence that receives its KV
        samples nothing here, so all full blocks of its prompt may be hits. Sets the computed tokens to what the prefix cache has.
        """
        assert not sequence.block_ids, f"{sequence.key} already has {len(sequence.block_ids)} blocks"
        num_known = self.num_known(sequence)
        num_matchable = (len(sequence.token_ids) - (sequence.state is not State.RESERVED)) // self.block_size
        if sequence.rates_prompt:  # each prompt token still to be rated takes the logits before it, so it must be computed
            num_matchable = min(num_matchable, sequence.num_rated // self.block_size)
        hits = self._index.match(sequence.block_keys, sequence.spec.cache_salt, sequence.token_ids, num_matchable)
        num_missing = num_known - len(hits)
        if num_missing + headroom > self.allocator.num_available - self.allocator.num_available_of(hits):
            return False
        self.allocator.share(sequence.owner, hits)
        allocated = self.allocator.allocate(sequence.owner, num_missing)
        assert allocated is not None, f"{num_missing} blocks were counted as available, but are not: {self.allocator.census()}"
        sequence.block_ids = hits + allocated
        sequence.table_row, sequence.num_tabled_blocks = self._take_row(), 0
        self.num_kept_for_growth += self._growth_at(sequence, num_known)
        sequence.num_computed = len(hits) * self.block_size
        self.num_hit_tokens += sequence.num_computed
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed
        if sequence.has_handoff:
            self.allocator.share(handoff_owner(sequence.key), sequence.block_ids)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Makes sure that the next token to compute has a slot; False if that takes a block and none is available."""
        if sequence.num_computed < len(sequence.block_ids) * self.block_size:
            return True
        assert sequence.kind is not Kind.PREFILL, f"{sequence.key} has all its blocks from the start, yet would grow"
        allocated = self.allocator.allocate(sequence.owner, 1)
        if allocated is None:
            return False
        num_blocks = len(sequence.block_ids)
        self.num_kept_for_growth += self._growth_at(sequence, num_blocks + 1) - self._growth_at(sequence, num_blocks)
        sequence.block_ids.extend(allocated)
        return True

    def set_computed(self, sequence: Sequence, num_computed: int) -> None:
        """Moves the computed tokens forward and makes the blocks that became full by that findable."""
        first_new, end_new = sequence.num_computed // self.block_size, num_computed // self.block_size
        sequence.num_computed = num_computed
        if end_new == first_new:
            return
        self._index.extend(sequence.block_keys, sequence.spec.cache_salt, sequence.token_ids, end_new * self.block_size)
        for block_index in range(first_new, end_new):
            self._index.register(sequence.block_ids[block_index], sequence.block_keys[block_index])

    def release(self, sequence: Sequence) -> None:
        """Drops the sequence's own Holds; a handoff Hold on the same blocks stays."""
        self.allocator.release(sequence.owner)
        if sequence.block_ids:
            self.num_kept_for_growth -= self._growth_at(sequence, len(sequence.block_ids))
            self._free_rows.append(sequence.table_row)
        sequence.block_ids = []
        sequence.table_row, sequence.num_tabled_blocks = -1, 0
        sequence.num_computed = 0

    def _take_row(self) -> int:
        """A row that no sequence with blocks has; there are never more rows than such sequences at one time."""
        if self._free_rows:
            return self._free_rows.pop()
        self._num_rows += 1
        return self._num_rows - 1

    def check_balance(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that the running numbers equal what counting over all sequences with blocks gives."""
        rows, growth = [], 0
        for sequence in sequences:
            rows.append(sequence.table_row)
            growth += self.growth_of(sequence)
        assert growth == self.num_kept_for_growth, f"{growth} blocks are kept for growth, {self.num_kept_for_growth} are counted"
        assert sorted(rows + self._free_rows) == list(range(self._num_rows)), f"table rows {rows}, free {self._free_rows}"

    def release_handoff(self, key: AttemptKey) -> None:
        self.allocator.release(handoff_owner(key))
