"""The seam to the memory that holds KV blocks: one-pass copies between scattered blocks and a contiguous slab.

The worker supplies it (from the engine's cache); the fabric knows blocks only as ids and bytes. Both calls run on the
worker's copy thread, on blocks that a Hold protects from reuse, and release the GIL while they copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

DIGEST_BYTES = 16
"""Length of the payload digest that gather and scatter return for the bytes they moved."""


class BlockCopier(Protocol):
    @property
    def block_bytes(self) -> int:
        """Bytes of one block in a slab: all layers, K and V, in the layout's wire format."""
        ...

    def gather(self, block_ids: Sequence[int], slab: memoryview) -> bytes:
        """Copies the blocks, in order, to the start of `slab`; returns the digest of those bytes."""
        ...

    def scatter(self, slab: memoryview, block_ids: Sequence[int]) -> bytes:
        """Copies the start of `slab` to the blocks, in order; returns the digest of the bytes that were copied."""
        ...
