"""Names the content of full KV blocks by a hash chain, and finds blocks that already hold the start of a sequence.

The key of a block is a cryptographic hash over its parent's key and its token ids, rooted in the model and the tenant's salt, so
it is the same in every process and two tenants never share. It knows the allocator (which keeps the content map) and block
indexes; it must not know sequences' states, devices or time.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from engine.block_allocator import BlockAllocator

KEY_BYTES = 16
"""128 bits: nobody finds two prompts with one key by chance, and with a keyed root nobody can try to."""


class PrefixIndex:
    """The prefix cache of one worker. Only full blocks have a key; `match` changes nothing but the list of keys that it is given."""

    def __init__(self, allocator: BlockAllocator, block_size: int, model_salt: bytes) -> None:
        """`model_salt` is what makes KV of equal tokens differ: the fingerprint of weights, dtype and layout."""
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, at least 1 is needed")
        self.block_size = block_size
        self._allocator = allocator
        self._model_key = blake2b(model_salt, digest_size=32, person=b"baton-model").digest()
        self._pack = struct.Struct(f"<{block_size}I").pack

    def root(self, cache_salt: bytes) -> bytes:
        """The parent of a tenant's first blocks. The hash is keyed by the model, so the two salts cannot run into each other."""
        return blake2b(cache_salt, key=self._model_key, digest_size=KEY_BYTES, person=b"baton-root").digest()

    def child(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The key of the block with these `block_size` token ids behind the block `parent`."""
        content = self._pack(*token_ids)
        return blake2b(parent + content, key=self._model_key, digest_size=KEY_BYTES, person=b"baton-block").digest()

    def extend(self, keys: list[bytes], cache_salt: bytes, token_ids: Sequence[int], num_tokens: int) -> None:
        """Appends to `keys` those still missing for the full blocks of `token_ids[:num_tokens]`; each is computed once only."""
        size = self.block_size
        parent = keys[-1] if keys else self.root(cache_salt)
        for start in range(len(keys) * size, num_tokens - size + 1, size):
            parent = self.child(parent, token_ids[start : start + size])
            keys.append(parent)

    def match(self, keys: list[bytes], cache_salt: bytes, token_ids: Sequence[int], num_blocks_max: int) -> list[int]:
        """The blocks of the longest known start of `token_ids`, at most `num_blocks_max`. Share them before the next allocation.

        Costs O(hit), whatever the length of the prompt: keys are appended to `keys` as far as blocks are found, and one beyond.
        """
        block_ids: list[int] = []
        while len(block_ids) < num_blocks_max:
            if len(block_ids) == len(keys):
                self.extend(keys, cache_salt, token_ids, (len(keys) + 1) * self.block_size)
            block_id = self._allocator.find(keys[len(block_ids)])
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def register(self, block_id: int, key: bytes) -> None:
        """Makes a held block, whose KV is computed or received in full, findable. An equal block found earlier stays the one."""
        self._allocator.set_content(block_id, key)
