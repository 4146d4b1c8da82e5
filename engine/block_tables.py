"""The block tables of all sequences with blocks, kept by a model runner from step to step; one row per sequence.

Owns one growing int32 table in host memory and applies a batch's updates to it, so that a step writes only the entries of blocks
that are new in it. It must not know sequences or the allocator; entries are block ids, 0 beyond the end of a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.batch import TableUpdate

Table = npt.NDArray[np.int32]


class BlockTables:
    """Rows and columns grow by doubling, as sequences and contexts do; nothing shrinks. Used by one thread only."""

    def __init__(self) -> None:
        self._ids: Table = np.zeros((8, 64), dtype=np.int32)
        self.num_entries_written = 0

    def apply(self, updates: Sequence[TableUpdate]) -> None:
        """Takes in the new blocks of one step, in order."""
        for row, first, block_ids in updates:
            end = first + len(block_ids)
            if row >= self._ids.shape[0] or end > self._ids.shape[1]:
                self._grow(row + 1, end)
            self._ids[row, first:end] = block_ids
            if first == 0:
                self._ids[row, end:] = 0  # what the row's last sequence left
            self.num_entries_written += len(block_ids)

    def _grow(self, num_rows: int, num_columns: int) -> None:
        rows, columns = self._ids.shape
        while rows < num_rows:
            rows *= 2
        while columns < num_columns:
            columns *= 2
        grown = np.zeros((rows, columns), dtype=np.int32)
        grown[: self._ids.shape[0], : self._ids.shape[1]] = self._ids
        self._ids = grown

    def select(self, rows: npt.NDArray[np.int32], num_blocks: int) -> Table:
        """The first `num_blocks` entries of some rows as one contiguous table [S, num_blocks]: one copy, no Python per entry."""
        return self._ids[rows, :num_blocks]
