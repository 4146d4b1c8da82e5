"""Whole blocks between the paged cache and a slab, with the digest of the copied bytes, in one pass of one Triton kernel.

Owns the kernel, the device staging between it and the host slab, and the stream that lets copies run beside the computation.
Knows bytes, not tensors' values: the lane sums of kernels/digest.py are integers modulo 2^64, so their order does not matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from kernels.digest import ROW_BYTES, finish_digest
from kernels.triton_launch import ROUND_EACH, on_device, padded

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_ROWS = 256  # rows of 64 bytes that a program copies at a time
_PARTS_MAX = 16  # programs for one block


@triton.jit(do_not_specialize=["num_rows"])
def _copy_blocks(
    cache_ptr,
    slab_ptr,
    ids_ptr,
    lanes_ptr,
    units_per_block,
    num_rows,
    IS_GATHER: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    """Program (i, part): part of the i-th block of the slab. A unit is UNIT bytes, the most that divide a block evenly.

    A block may begin inside a row of the digest: then all its columns stand for lanes further on, by the same distance.
    """
    PER_ROW: tl.constexpr = ROW_BYTES // UNIT
    first = tl.program_id(0).to(tl.int64) * units_per_block  # of this block, in the slab
    base = tl.load(ids_ptr + tl.program_id(0)) * units_per_block  # of this block, in the cache
    row = tl.arange(0, ROWS).to(tl.int64)[:, None]
    column = tl.arange(0, PER_ROW).to(tl.int64)[None, :]
    lanes_a = tl.zeros((ROWS, PER_ROW), dtype=tl.int64)
    lanes_b = tl.zeros((ROWS, PER_ROW), dtype=tl.int64)
    for start in range(tl.program_id(1) * ROWS * PER_ROW, units_per_block, tl.num_programs(1) * ROWS * PER_ROW):
        unit = start + row * PER_ROW + column
        inside = unit < units_per_block
        if IS_GATHER:
            value = tl.load(cache_ptr + base + unit, mask=inside, other=0)
            tl.store(slab_ptr + first + unit, value, mask=inside)
        else:
            value = tl.load(slab_ptr + first + unit, mask=inside, other=0)
            tl.store(cache_ptr + base + unit, value, mask=inside)
        word = value.to(tl.int64)
        if UNIT < 8:  # the sign was extended
            word = word & ((1 << (8 * UNIT)) - 1)
        word = word << ((first + column) * UNIT % 8 * 8)
        lanes_a += word
        lanes_b += word * (num_rows - (first + unit) // PER_ROW)  # a word in row i is in the sums of its row and all later ones
    lane = (first + tl.arange(0, PER_ROW)) % PER_ROW * UNIT // 8
    tl.atomic_add(lanes_ptr + lane, tl.sum(lanes_a, axis=0))
    tl.atomic_add(lanes_ptr + 8 + lane, tl.sum(lanes_b, axis=0))


class BlockCopies:
    """Gather and scatter for the caches of one device. Calls may come from any thread; each waits for its own copy.

    On a GPU copies have a stream of their own, which waits for all that is queued for computation when a copy starts: the KV
    that it reads is complete by then, and what is queued later runs beside it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def gather(self, cache: torch.Tensor, block_ids: Sequence[int], slab: memoryview, num_bytes: int) -> bytes:
        """Blocks of `cache` to the first `num_bytes` of `slab`; returns the digest of those bytes."""
        if not num_bytes:
            return finish_digest(bytes(2 * ROW_BYTES), 0)
        with self._beside_computation():
            staged = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            lanes = self.launch(cache, block_ids, staged, is_gather=True)
            torch.frombuffer(slab, dtype=torch.uint8, count=num_bytes).copy_(staged)
            return finish_digest(lanes.cpu().numpy().astype("<i8").tobytes(), num_bytes)

    def scatter(self, slab: memoryview, cache: torch.Tensor, block_ids: Sequence[int], num_bytes: int) -> bytes:
        """The first `num_bytes` of `slab` to blocks of `cache`; returns the digest of the very bytes that were stored."""
        if not num_bytes:
            return finish_digest(bytes(2 * ROW_BYTES), 0)
        source = bytearray(slab.cast("B")[:num_bytes]) if slab.readonly else slab  # torch takes no read-only buffer
        with self._beside_computation():
            staged = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            staged.copy_(torch.frombuffer(source, dtype=torch.uint8, count=num_bytes))
            lanes = self.launch(cache, block_ids, staged, is_gather=False)
            return finish_digest(lanes.cpu().numpy().astype("<i8").tobytes(), num_bytes)

    @contextlib.contextmanager
    def _beside_computation(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with on_device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            yield

    def launch(self, cache: torch.Tensor, block_ids: Sequence[int], staged: torch.Tensor, is_gather: bool) -> torch.Tensor:
        """Launches the copy between `cache` and `staged` uint8 [bytes]; returns the lane sums int64 [16] to be.

        All are on the device; the sums and the copy are complete when the current stream is.
        """
        block_bytes = staged.numel() // len(block_ids)
        unit = _unit_bytes(block_bytes | cache.data_ptr())
        units_per_block = block_bytes // unit
        parts = min(_PARTS_MAX, -(-block_bytes // (_ROWS * ROW_BYTES)))
        lanes = torch.zeros(16, dtype=torch.int64, device=self._device)
        _copy_blocks[(len(block_ids), parts)](
            cache.view(-1).view(_UNITS[unit]),
            staged.view(_UNITS[unit]),
            torch.tensor(list(block_ids), dtype=torch.int64, device=self._device),
            lanes,
            units_per_block,
            -(-staged.numel() // ROW_BYTES),
            IS_GATHER=is_gather,
            UNIT=unit,
            ROWS=min(_ROWS, padded(-(-block_bytes // ROW_BYTES))),
            ROW_BYTES=ROW_BYTES,
            num_warps=4,
            **ROUND_EACH,
        )
        return lanes


def _unit_bytes(extent: int) -> int:
    """The largest of 8, 4, 2 and 1 bytes that divides `extent`."""
    return min(8, extent & -extent)
