"""Owns the pool of KV blocks: who holds each block, which content it keeps, and which one is reused next.

Every reason a block may not be reused is a Hold, named by its owner (`seq:…`, `handoff:…`); a block is *held* while it has
one, else *cached* (it keeps content that `find` still returns, reused oldest first) or *free* (no content). It must not know
sequences, hashes, devices or time; content keys are opaque bytes, and all numbers are blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from common.types import BlockCensus


class BlockAllocator:
    """Holds on `num_blocks` blocks; not thread-safe. A misuse is an AssertionError, a full pool is None.

    An owner has at most one Hold on a block and drops all of its Holds at once, so no partly released table can exist.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, at least 1 is needed")
        self.num_blocks = num_blocks
        # A stack: the block freed last is reused first, so the memory that is touched grows with use only.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        # A count per block and a set per owner: a Hold costs the same however many others share the block.
        self._num_holds: dict[int, int] = {}
        self._held_by: dict[str, dict[int, None]] = {}  # in the order in which the owner got them
        self._content: dict[int, bytes] = {}
        self._block_of_content: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return len(self._num_holds)

    def allocate(self, owner: str, count: int) -> list[int] | None:
        """Gives `owner` a Hold on `count` blocks whose content is up to it; None, and no change, if so many are not available.

        Blocks without content go first, then the cached ones that were released longest ago; their content is forgotten.
        """
        assert count >= 0, f"{owner} asks for {count} blocks"
        if count > self.num_available:
            return None
        block_ids = [self._take() for _ in range(count)]
        if block_ids:
            self._add_holds(owner, block_ids)
        return block_ids

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block_id, _ = self._cached.popitem(last=False)
        del self._block_of_content[self._content.pop(block_id)]
        return block_id

    def share(self, owner: str, block_ids: Sequence[int]) -> None:
        """Gives `owner` a Hold on blocks that are held or cached. A free block has nothing to share: that is a bug."""
        for block_id in block_ids:
            if block_id in self._cached:
                del self._cached[block_id]
            else:
                assert block_id in self._num_holds, (
                    f"{owner} shares block {block_id}, which nobody holds and which has no content"
                )
        if block_ids:
            self._add_holds(owner, block_ids)

    def _add_holds(self, owner: str, block_ids: Sequence[int]) -> None:
        held, num_holds = self._held_by.setdefault(owner, {}), self._num_holds
        for block_id in block_ids:
            assert block_id not in held, f"{owner} already holds block {block_id}"
            held[block_id] = None
            num_holds[block_id] = num_holds.get(block_id, 0) + 1

    def release(self, owner: str) -> int:
        """Drops all Holds of `owner` (none is fine) and returns how many blocks became available by that.

        Later blocks of a sequence are set free first, so a cached chain loses its tail before its head: without the head the
        tail is useless.
        """
        num_available_before = self.num_available
        num_holds = self._num_holds
        for block_id in reversed(self._held_by.pop(owner, {})):
            if num_holds[block_id] > 1:
                num_holds[block_id] -= 1
                continue
            del num_holds[block_id]
            if block_id in self._content:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)
        return self.num_available - num_available_before

    def held_by(self, owner: str) -> tuple[int, ...]:
        """The blocks of one owner, in the order in which it got them."""
        return tuple(self._held_by.get(owner, ()))

    def set_content(self, block_id: int, content: bytes) -> bool:
        """Makes a held block findable under `content`. False, and no change, if another block already has that content."""
        assert block_id in self._num_holds, f"block {block_id} gets content, but nobody holds it"
        if content in self._block_of_content:
            return self._block_of_content[content] == block_id
        assert block_id not in self._content, f"block {block_id} already has other content"
        self._content[block_id] = content
        self._block_of_content[content] = block_id
        return True

    def find(self, content: bytes) -> int | None:
        """The held or cached block that has this content. It stays so only until the next `allocate` unless it is shared."""
        return self._block_of_content.get(content)

    def num_available_of(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks are cached, that is counted in `num_available` now and no more once they are shared."""
        return sum(block_id in self._cached for block_id in block_ids)

    def free_block_ids(self) -> tuple[int, ...]:
        """The blocks without content and Hold. Whatever they contain must never be read again."""
        return tuple(self._free)

    def census(self) -> BlockCensus:
        return BlockCensus(
            total=self.num_blocks,
            free=len(self._free),
            cached=len(self._cached),
            held=len(self._num_holds),
            held_by={owner: len(block_ids) for owner, block_ids in self._held_by.items()},
        )

    def check_balance(self) -> None:
        """Asserts free + cached + held = total and that held blocks have owners; O(owners)."""
        parts = len(self._free) + len(self._cached) + len(self._num_holds)
        assert parts == self.num_blocks, f"{parts} of {self.num_blocks} blocks are accounted for: {self.census()}"
        num_holds = sum(map(len, self._held_by.values()))
        assert num_holds >= len(self._num_holds), f"{len(self._num_holds)} blocks are held by only {num_holds} Holds"
        assert self._num_holds or not self._held_by, f"owners without a block: {sorted(self._held_by)}"
        assert len(self._content) == len(self._block_of_content), "a content key points to no block, or to two"

    def check_integrity(self) -> None:
        """Asserts every invariant block by block; O(blocks), for tests."""
        self.check_balance()
        places = sorted([*self._free, *self._cached, *self._num_holds])
        assert places == list(range(self.num_blocks)), f"a block is in two places, or in none: {places}"
        counted = Counter(block_id for block_ids in self._held_by.values() for block_id in block_ids)
        assert counted == self._num_holds, f"Holds {counted} and their counts {self._num_holds} differ"
        assert all(self._block_of_content[key] == block_id for block_id, key in self._content.items()), "content maps differ"
        assert all(block_id in self._content for block_id in self._cached), "a cached block has no content"
        assert not any(block_id in self._content for block_id in self._free), "a free block has content"
