"""The allocator against a naive model: any order of allocate, share, release and set_content keeps every promise about blocks."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_allocator import BlockAllocator

OWNERS = [f"{kind}:{name}" for kind in ("seq", "handoff") for name in "abc"]
owners = st.sampled_from(OWNERS)


class AllocatorMachine(RuleBasedStateMachine):
    """The model: who holds what, which block has which content, and in which order unheld content was released."""

    def __init__(self) -> None:
        super().__init__()
        self.num_blocks = 7
        self.allocator = BlockAllocator(self.num_blocks)
        self.held: dict[str, list[int]] = {owner: [] for owner in OWNERS}
        self.content: dict[int, bytes] = {}
        self.cached: list[int] = []
        self.num_contents = 0

    def holders(self, block_id: int) -> list[str]:
        return [owner for owner, block_ids in self.held.items() if block_id in block_ids]

    def free(self) -> set[int]:
        return {block_id for block_id in range(self.num_blocks) if not self.holders(block_id) and block_id not in self.cached}

    @rule(owner=owners, count=st.integers(0, 5))
    def allocate(self, owner: str, count: int) -> None:
        free = self.free()
        block_ids = self.allocator.allocate(owner, count)
        if count > len(free) + len(self.cached):
            assert block_ids is None
            return
        assert block_ids is not None and len(block_ids) == len(set(block_ids)) == count
        num_evicted = max(0, count - len(free))
        evicted, self.cached = self.cached[:num_evicted], self.cached[num_evicted:]
        assert set(block_ids[: count - num_evicted]) <= free, "blocks without content go first"
        assert block_ids[count - num_evicted :] == evicted, "then the longest released ones"
        for block_id in evicted:
            assert self.allocator.find(self.content.pop(block_id)) is None
        self.held[owner] += block_ids

    @rule(owner=owners, data=st.data())
    def share(self, owner: str, data: st.DataObject) -> None:
        sharable = [b for b in range(self.num_blocks) if (self.holders(b) or b in self.cached) and b not in self.held[owner]]
        block_ids = data.draw(st.lists(st.sampled_from(sharable), unique=True)) if sharable else []
        assert self.allocator.num_available_of(block_ids) == len(set(block_ids) & set(self.cached))
        self.allocator.share(owner, block_ids)
        self.held[owner] += block_ids
        self.cached = [block_id for block_id in self.cached if block_id not in block_ids]

    @rule(owner=owners)
    def release(self, owner: str) -> None:
        block_ids, self.held[owner] = self.held[owner], []
        unheld = [block_id for block_id in reversed(block_ids) if not self.holders(block_id)]
        assert self.allocator.release(owner) == len(unheld)
        self.cached += [block_id for block_id in unheld if block_id in self.content]

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), is_known=st.booleans())
    def set_content(self, data: st.DataObject, is_known: bool) -> None:
        block_id = data.draw(st.sampled_from([b for block_ids in self.held.values() for b in block_ids]))
        if block_id in self.content:
            assert self.allocator.set_content(block_id, self.content[block_id])
            return
        if is_known and self.content:
            other = data.draw(st.sampled_from(sorted(self.content)))
            assert not self.allocator.set_content(block_id, self.content[other])
            return
        self.num_contents += 1
        content = f"content-{self.num_contents}".encode()
        assert self.allocator.set_content(block_id, content)
        self.content[block_id] = content

    @invariant()
    def allocator_agrees_with_the_model(self) -> None:
        self.allocator.check_integrity()
        census = self.allocator.census()
        assert census.free == len(self.free()) and census.cached == len(self.cached)
        assert census.free + census.cached + census.held == census.total == self.num_blocks
        assert census.held_by == {owner: len(block_ids) for owner, block_ids in self.held.items() if block_ids}
        for owner, block_ids in self.held.items():
            assert self.allocator.held_by(owner) == tuple(block_ids)
        for block_id, content in self.content.items():
            assert self.allocator.find(content) == block_id
        assert set(self.allocator.free_block_ids()) == self.free()


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestAllocatorMachine = AllocatorMachine.TestCase
