"""Claims about the keys of blocks and about matching."""

from __future__ import annotations

import os
import subprocess
import sys

from engine.block_allocator import BlockAllocator
from engine.prefix_index import PrefixIndex

TOKENS = tuple(range(100, 112))


def keys_of(tokens=TOKENS, *, salt: bytes = b"", model: bytes = b"m", block_size: int = 4) -> list[bytes]:
    keys: list[bytes] = []
    PrefixIndex(BlockAllocator(1), block_size, model).extend(keys, salt, tokens, len(tokens))
    return keys


def test_only_full_blocks_have_a_key() -> None:
    assert [len(keys_of(TOKENS[:count])) for count in (0, 3, 4, 5, 7, 8, 12)] == [0, 0, 1, 1, 1, 2, 3]


def test_keys_can_be_extended_later_and_are_the_same() -> None:
    index = PrefixIndex(BlockAllocator(1), 4, b"m")
    keys: list[bytes] = []
    for count in range(len(TOKENS) + 1):
        index.extend(keys, b"", TOKENS, count)
    assert keys == keys_of()


def test_a_key_depends_on_all_tokens_before_the_block() -> None:
    changed = keys_of((999, *TOKENS[1:]))
    assert not set(changed) & set(keys_of())
    tail_changed = keys_of((*TOKENS[:-1], 999))
    assert tail_changed[:2] == keys_of()[:2] and tail_changed[2] != keys_of()[2]


def test_the_order_of_tokens_matters() -> None:
    assert keys_of((1, 2, 3, 4)) != keys_of((2, 1, 3, 4))


def test_tenants_and_models_never_share_a_key() -> None:
    variants = [keys_of(salt=b"a"), keys_of(salt=b"b"), keys_of(salt=b""), keys_of(model=b"n"), keys_of(salt=b"m", model=b"")]
    assert len({key for keys in variants for key in keys}) == sum(map(len, variants))


def test_keys_are_the_same_in_a_process_with_another_hash_seed() -> None:
    program = (
        "from engine.block_allocator import BlockAllocator; from engine.prefix_index import PrefixIndex; keys=[];"
        "PrefixIndex(BlockAllocator(1), 4, b'm').extend(keys, b'', tuple(range(100, 112)), 12); print([k.hex() for k in keys])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == str([key.hex() for key in keys_of()])


def test_match_is_the_longest_unbroken_start() -> None:
    allocator = BlockAllocator(4)
    index = PrefixIndex(allocator, 4, b"m")
    block_ids = allocator.allocate("a", 3)
    assert block_ids is not None
    keys = keys_of()
    index.register(block_ids[0], keys[0])
    index.register(block_ids[2], keys[2])
    assert index.match([], b"", TOKENS, 3) == block_ids[:1], "the hole ends the match"
    index.register(block_ids[1], keys[1])
    assert index.match([], b"", TOKENS, 3) == block_ids
    assert index.match(keys_of(), b"", TOKENS, 2) == block_ids[:2]
    assert index.match([], b"other", TOKENS, 3) == []


def test_match_computes_the_keys_of_the_hit_and_one_more_whatever_the_prompt_s_length() -> None:
    allocator = BlockAllocator(4)
    index = PrefixIndex(allocator, 4, b"m")
    block_ids = allocator.allocate("a", 2)
    assert block_ids is not None
    for block_id, key in zip(block_ids, keys_of(), strict=False):
        index.register(block_id, key)
    keys: list[bytes] = []
    prompt = (*TOKENS[:8], *range(500, 4500))
    assert index.match(keys, b"", prompt, 1000) == block_ids
    assert len(keys) == 3 and keys[:2] == keys_of()[:2]
    assert index.match(keys, b"", prompt, 1000) == block_ids and len(keys) == 3, "a second look computes none"
