"""Blocks on the wire in about half the bytes: int8 or fp8 values with one scale for each layer, K or V and head of a block.

Owns the format, its torch implementation (the specification) and the native one, which gives the same bits; it must not know handoffs.
A wire block is the values [L, 2, Hkv, block_size, D] of one byte each, then the scales fp32 [L, 2, Hkv], then zeros up to a multiple
of 64 bytes, all little-endian. Lossy: what is scattered differs from what was gathered.

A scale is the largest magnitude of its group divided by 127 (int8) or 448 (fp8, e4m3 without infinities, arXiv 2209.05433), values are
rounded to nearest, ties to even. A group below 1e-30 becomes zeros; one with a NaN or an infinity becomes NaN, so that damage shows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from ctypes import POINTER, c_int, c_int64, c_uint64, c_void_p
from typing import Any

import numpy as np
import torch

from kernels import checks
from kernels.digest import ROW_BYTES, finish_digest, payload_digest
from kernels.native_build import NativeUnavailable, load_library

VALUE_MAX = {"int8": 127.0, "fp8": 448.0}
TINY = 1e-30
_STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}
_LANES = c_uint64 * 16
_log = logging.getLogger(__name__)


def wire_block_bytes(num_groups: int, group_values: int) -> int:
    """Bytes of one block of `num_groups` groups (layers x 2 x heads) of `group_values` values (block_size x D)."""
    return -(-num_groups * (group_values + 4) // ROW_BYTES) * ROW_BYTES


class WireBlocks:
    """A cache [B, L, 2, Hkv, block_size, D] (fp32 or bf16) as whole blocks in a wire format. Serves as the fabric's BlockCopier.

    Computed with torch here. Raises ValueError for an unknown format or another dtype.
    """

    def __init__(self, cache: torch.Tensor, wire_format: str) -> None:
        checks.check_rank("cache", cache, 6)
        if wire_format not in VALUE_MAX or cache.dtype not in _IS_BF16:
            raise ValueError(f"no wire format {wire_format!r} for {cache.dtype}: {', '.join(VALUE_MAX)} for float32 and bfloat16")
        self.format = wire_format
        self._cache = cache
        self._num_groups = cache.shape[1] * cache.shape[2] * cache.shape[3]
        self._group = cache.shape[4] * cache.shape[5]
        self._block_bytes = wire_block_bytes(self._num_groups, self._group)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on the wire."""
        return self._block_bytes

    def gather(self, block_ids: Sequence[int], slab: memoryview) -> bytes:
        """Quantises the blocks, in order, to the start of `slab`; returns the digest of those bytes."""
        num_bytes = self._check(block_ids, slab, slab_is_written=True)
        wire = torch.frombuffer(slab, dtype=torch.uint8)[:num_bytes].view(len(block_ids), self._block_bytes)
        groups = self._cache[list(block_ids)].float().cpu().view(len(block_ids), self._num_groups, self._group)
        amax = groups.abs().amax(dim=2)
        used = torch.isfinite(amax) & (amax >= TINY)
        limit = VALUE_MAX[self.format]
        scales = torch.where(used, amax / limit, torch.where(torch.isfinite(amax), 0.0, torch.nan))
        inverse = torch.full_like(amax, limit) / amax  # a number divided by a tensor would be rounded twice
        scaled = torch.where(used[:, :, None], groups * inverse[:, :, None], 0.0).clamp(-limit, limit)
        values = (scaled.round() if self.format == "int8" else scaled).to(_STORED[self.format])
        end = self._num_groups * self._group
        wire[:, :end] = values.view(torch.uint8).reshape(len(block_ids), end)
        wire[:, end : end + 4 * self._num_groups] = scales.contiguous().view(torch.uint8)
        wire[:, end + 4 * self._num_groups :] = 0
        return payload_digest(slab[:num_bytes])

    def scatter(self, slab: memoryview, block_ids: Sequence[int]) -> bytes:
        """Dequantises the start of `slab` to the blocks (distinct), in order; returns the digest of the bytes that were read."""
        num_bytes = self._check(block_ids, slab, slab_is_written=False)
        wire = torch.from_numpy(np.frombuffer(slab, np.uint8)[:num_bytes].copy()).view(len(block_ids), self._block_bytes)
        end = self._num_groups * self._group
        values = wire[:, :end].contiguous().view(_STORED[self.format]).float().view(len(block_ids), self._num_groups, self._group)
        scales = wire[:, end : end + 4 * self._num_groups].clone().view(torch.float32)
        blocks = (values * scales[:, :, None]).to(self._cache.dtype)
        self._cache[list(block_ids)] = blocks.view(len(block_ids), *self._cache.shape[1:]).to(self._cache.device)
        return payload_digest(wire.numpy().data)

    def _check(self, block_ids: Sequence[int], slab: memoryview, *, slab_is_written: bool) -> int:
        num_blocks, count = self._cache.shape[0], len(block_ids)
        num_bytes = count * self._block_bytes
        if not count or min(block_ids) < 0 or max(block_ids) >= num_blocks:
            raise ValueError(f"{count} block ids must lie within the cache's {num_blocks} blocks: {list(block_ids)[:8]}")
        if not slab_is_written and len(set(block_ids)) != count:
            raise ValueError(f"scatter into {count} blocks names only {len(set(block_ids))} distinct ones")
        if not slab.c_contiguous or slab.nbytes < num_bytes or (slab_is_written and slab.readonly):
            raise ValueError(f"a slab of {slab.nbytes} bytes cannot take {count} x {self._block_bytes} bytes, or is read-only")
        return num_bytes


class NativeWireBlocks(WireBlocks):
    """The same in C++, in one pass, with the GIL released. Raises NativeUnavailable."""

    def __init__(self, cache: torch.Tensor, wire_format: str) -> None:
        super().__init__(cache, wire_format)
        if cache.device.type != "cpu":
            raise NativeUnavailable(f"native kernels run on cpu, not on {cache.device.type!r}")
        library = load_library().handle
        self._gather, self._scatter = library.baton_wire_gather, library.baton_wire_scatter
        shape: list[Any] = [c_int64, c_int64, c_int64, c_void_p, c_int64]
        self._gather.argtypes = [c_int, c_int, c_void_p, *shape, c_void_p, POINTER(c_uint64)]
        self._scatter.argtypes = [c_int, c_int, c_void_p, c_void_p, *shape, POINTER(c_uint64)]
        self._gather.restype = self._scatter.restype = None

    def gather(self, block_ids: Sequence[int], slab: memoryview) -> bytes:
        num_bytes = self._check(block_ids, slab, slab_is_written=True)
        ids, target, lanes = np.array(block_ids, np.int64), np.frombuffer(slab, np.uint8), _LANES()
        self._gather(*self._kind, self._cache.data_ptr(), *self._extent(ids), target.ctypes.data, lanes)
        return finish_digest(bytes(lanes), num_bytes)

    def scatter(self, slab: memoryview, block_ids: Sequence[int]) -> bytes:
        num_bytes = self._check(block_ids, slab, slab_is_written=False)
        ids, source, lanes = np.array(block_ids, np.int64), np.frombuffer(slab, np.uint8), _LANES()
        self._scatter(*self._kind, source.ctypes.data, self._cache.data_ptr(), *self._extent(ids), lanes)
        return finish_digest(bytes(lanes), num_bytes)

    @property
    def _kind(self) -> tuple[int, int]:
        return _IS_BF16[self._cache.dtype], int(self.format == "fp8")

    def _extent(self, ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> tuple[int, int, int, int, int]:
        return self._num_groups, self._group, self._block_bytes, ids.ctypes.data, len(ids)


def select_wire_blocks(cache: torch.Tensor, wire_format: str, choice: str | None = None) -> WireBlocks:
    """Native where it can be had, else torch with one logged warning. `choice` (default: BATON_KERNELS, else auto) may insist."""
    wanted = choice if choice is not None else os.environ.get("BATON_KERNELS", "auto")
    if wanted == "reference" or (wanted == "auto" and cache.device.type != "cpu"):
        return WireBlocks(cache, wire_format)
    try:
        return NativeWireBlocks(cache, wire_format)
    except NativeUnavailable as error:
        if wanted == "native":
            raise RuntimeError(f"BATON_KERNELS=native, but: {error}") from error
        _log.warning("native wire format unavailable, using torch: %s", error)
        return WireBlocks(cache, wire_format)
