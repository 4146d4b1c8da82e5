"""Claims about Holds, reuse order and content of the block allocator."""

from __future__ import annotations

import pytest

from engine.block_allocator import BlockAllocator


def allocate(allocator: BlockAllocator, owner: str, count: int) -> list[int]:
    block_ids = allocator.allocate(owner, count)
    assert block_ids is not None
    allocator.check_integrity()
    return block_ids


def test_a_block_is_never_given_twice_and_a_full_pool_is_none_without_change() -> None:
    allocator = BlockAllocator(4)
    assert sorted(allocate(allocator, "a", 3) + allocate(allocator, "b", 1)) == [0, 1, 2, 3]
    before = allocator.census()
    assert allocator.allocate("c", 1) is None
    assert allocator.census() == before
    assert allocator.allocate("c", 0) == []


def test_a_block_is_available_only_when_its_last_hold_is_gone() -> None:
    allocator = BlockAllocator(2)
    block_ids = allocate(allocator, "seq:a", 2)
    allocator.share("handoff:a", block_ids)
    assert allocator.release("seq:a") == 0
    assert allocator.num_available == 0 and allocator.census().held_by == {"handoff:a": 2}
    assert allocator.release("handoff:a") == 2
    allocator.check_integrity()
    assert allocator.census().free == 2


def test_release_of_an_owner_without_holds_changes_nothing() -> None:
    allocator = BlockAllocator(2)
    allocate(allocator, "a", 1)
    assert allocator.release("nobody") == 0
    assert allocator.num_held == 1


def test_released_content_stays_findable_until_its_block_is_reused() -> None:
    allocator = BlockAllocator(2)
    first, second = allocate(allocator, "a", 2)
    assert allocator.set_content(first, b"one")
    allocator.release("a")
    assert allocator.census().cached == 1 and allocator.find(b"one") == first
    assert allocate(allocator, "b", 1) == [second], "a block without content goes before a cached one"
    assert allocator.find(b"one") == first
    assert allocate(allocator, "b", 1) == [first]
    assert allocator.find(b"one") is None


def test_cached_blocks_are_reused_longest_released_first_and_the_tail_of_a_table_before_its_head() -> None:
    allocator = BlockAllocator(4)
    head, tail = allocate(allocator, "a", 2)
    other = allocate(allocator, "b", 1)[0]
    for block_id in (head, tail, other):
        allocator.set_content(block_id, bytes([block_id]))
    allocator.release("a")
    allocator.release("b")
    allocate(allocator, "c", 1)
    assert allocate(allocator, "c", 3) == [tail, head, other]


def test_sharing_a_cached_block_takes_it_out_of_reuse() -> None:
    allocator = BlockAllocator(1)
    (block_id,) = allocate(allocator, "a", 1)
    allocator.set_content(block_id, b"x")
    allocator.release("a")
    allocator.share("b", [block_id])
    assert allocator.allocate("c", 1) is None
    assert allocator.find(b"x") == block_id


def test_equal_content_keeps_the_first_block() -> None:
    allocator = BlockAllocator(2)
    first, second = allocate(allocator, "a", 2)
    assert allocator.set_content(first, b"x") and allocator.set_content(first, b"x")
    assert not allocator.set_content(second, b"x")
    allocator.release("a")
    assert (allocator.census().cached, allocator.census().free) == (1, 1)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda allocator, held, free: allocator.share("b", [free]),
        lambda allocator, held, free: allocator.share("a", [held]),
        lambda allocator, held, free: allocator.set_content(free, b"x"),
        lambda allocator, held, free: allocator.allocate("b", -1),
    ],
)
def test_misuse_is_an_assertion(misuse) -> None:
    allocator = BlockAllocator(2)
    (held,) = allocate(allocator, "a", 1)
    with pytest.raises(AssertionError):
        misuse(allocator, held, 1 - held)


def test_a_block_cannot_change_its_content_while_it_is_held() -> None:
    allocator = BlockAllocator(1)
    (block_id,) = allocate(allocator, "a", 1)
    allocator.set_content(block_id, b"x")
    with pytest.raises(AssertionError, match="already has other content"):
        allocator.set_content(block_id, b"y")


@pytest.mark.parametrize("damage", ["lost", "twice", "stray owner"])
def test_the_balance_check_notices_damage(damage: str) -> None:
    allocator = BlockAllocator(3)
    allocate(allocator, "a", 1)
    if damage == "lost":
        allocator._free.pop()
    elif damage == "twice":
        allocator._free.append(allocator._free[0])
    else:
        allocator._held_by.clear()
    with pytest.raises(AssertionError):
        allocator.check_balance()


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockAllocator(0)
