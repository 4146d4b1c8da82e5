"""The paged KV cache: one tensor that holds the blocks of all layers, and whole-block copies in and out of it.

Owns the memory and its layout, block-major `[B, L, 2, Hkv, block_size, D]` so that a block is one contiguous piece; knows not
which blocks are in use (the allocator does). Gather and scatter may run on another thread than the engine's, on blocks that a
Hold protects: they touch no other memory and release the GIL while they copy.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch

from kernels.ops import Ops


class KVCache:
    """`num_blocks` blocks of `block_size` tokens for all layers. Implements the fabric's BlockCopier.

    On the CPU the memory is anonymous and private: pages (huge ones where the system has them) are zero and cost nothing until they
    are first written, so a large pool grows with its use. Elsewhere it is a plain zero tensor. Raises ValueError for an extent below 1.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
    ) -> None:
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        if min(shape) < 1:
            raise ValueError(f"a KV cache [B, L, 2, Hkv, block_size, D] of shape {shape} holds nothing")
        self._ops = ops
        self._block_bytes = 2 * num_layers * num_kv_heads * block_size * head_dim * dtype.itemsize
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tensor: torch.Tensor = _lazy_zeros(shape, dtype, device)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, K and V."""
        return self._block_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks (address space on the CPU; resident only as far as used)."""
        return self._block_bytes * self.num_blocks

    def gather(self, block_ids: Sequence[int], slab: memoryview) -> bytes:
        """Copies the blocks, in order, to the start of `slab`; returns the digest of those bytes."""
        return self._ops.gather_blocks(self.tensor, block_ids, slab)

    def scatter(self, slab: memoryview, block_ids: Sequence[int]) -> bytes:
        """Copies the start of `slab` to the blocks (distinct), in order; returns the digest of the bytes that were copied."""
        return self._ops.scatter_blocks(slab, self.tensor, block_ids)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros without touching a page: torch.zeros would write, and so make resident, all of a pool that may never fill up."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = dtype.itemsize
    for extent in shape:
        num_bytes *= extent
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Attention reads small pieces from blocks that lie anywhere: with 4 KiB pages it waits for address translation more than for
    # data. A refusal (a kernel without huge pages) costs speed only.
    with contextlib.suppress(OSError):
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=dtype).view(shape)  # the tensor keeps the mapping alive
