"""The operations as C++ kernels on the CPU, called through ctypes with the GIL released.

Owns the checks between Python and raw pointers (every shape, dtype, contiguity and index bound; a wrong pointer never reaches C)
and the choice of threads; the arithmetic lies in kernels/cpu. fp32 and bf16; results of a row do not depend on the other rows,
on chunking or on the number of threads, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_float, c_int, c_int64, c_uint64, c_void_p
from typing import Any

import numpy as np
import torch

from kernels import checks
from kernels.digest import finish_digest
from kernels.native_build import NativeLibrary, NativeUnavailable, load_library
from kernels.ops import AttentionMeta, PackedLinear

LAYOUT = "panels16"
PANEL = 16
_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


class _Cache(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("num_blocks", c_int64),
        ("num_layers", c_int64),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
        ("layer", c_int64),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("num_tokens", c_int64),
        ("num_sequences", c_int64),
        ("blocks_max", c_int64),
    )


_Lanes = c_uint64 * 16
_P, _N, _I = c_void_p, c_int64, c_int
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "baton_pack_linear": ([_I, _P, _P, _N, _N, _I], None),
    "baton_linear": ([_I, _P, _P, _P, _P, _N, _N, _N, _I], None),
    "baton_embedding": ([_N, _P, _P, _P, _N, _N], c_int64),
    "baton_rms_norm": ([_I, _P, _P, _P, c_float, _P, _P, _N, _N, _I], None),
    "baton_rope": ([_I, _P, _P, _P, _P, _N, _N, _N, _N, _N, _I], None),
    "baton_silu_mul": ([_I, _P, _P, _N, _N, _I], None),
    "baton_kv_write": ([_I, _P, _P, POINTER(_Cache), _P, _N], c_int64),
    "baton_attention": ([_I, _P, POINTER(_Cache), POINTER(_Batch), _N, c_float, _N, _P, _I], c_int64),
    "baton_gather": ([_P, _N, _P, _N, _P, POINTER(c_uint64)], None),
    "baton_scatter": ([_P, _P, _N, _P, _N, POINTER(c_uint64)], None),
}


class NativeOps:
    """The C++ kernels. Raises NativeUnavailable when they cannot be built or loaded, or do not serve `dtype`."""

    def __init__(self, dtype: torch.dtype, library: NativeLibrary | None = None) -> None:
        if dtype not in _IS_BF16:
            raise NativeUnavailable(f"native kernels serve {', '.join(map(str, _IS_BF16))}, not {dtype}")
        self._library = load_library() if library is None else library
        functions: dict[str, Callable[..., Any]] = {}
        for name, (argument_types, result_type) in _SIGNATURES.items():
            function = getattr(self._library.handle, name)
            function.argtypes, function.restype = argument_types, result_type
            functions[name] = function
        self._c = functions

    @property
    def name(self) -> str:
        return "native"

    def describe(self) -> str:
        return f"native (C++, {self._library.instruction_set}, {torch.get_num_threads()} threads): {self._library.path}"

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        checks.check_pack(weight, bias)
        num_outputs, num_inputs = weight.shape
        num_panels = -(-num_outputs // PANEL)
        packed = torch.empty((num_panels, num_inputs, PANEL), dtype=weight.dtype)
        self._c["baton_pack_linear"](
            _kind("weight", weight), weight.data_ptr(), packed.data_ptr(), num_outputs, num_inputs, torch.get_num_threads()
        )
        return PackedLinear(packed, bias, num_outputs, num_inputs, LAYOUT)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        checks.check_linear(x, packed, LAYOUT)
        num_tokens = x.shape[0]
        out = torch.empty((num_tokens, packed.num_outputs), dtype=x.dtype)
        self._c["baton_linear"](
            _kind("x", x),
            x.data_ptr(),
            packed.weight.data_ptr(),
            None if packed.bias is None else packed.bias.data_ptr(),
            out.data_ptr(),
            num_tokens,
            packed.num_outputs,
            packed.num_inputs,
            torch.get_num_threads(),
        )
        return out

    def embedding(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        checks.check_embedding(ids, table)
        _kind("table", table)
        num_tokens, (vocab_size, width) = ids.shape[0], table.shape
        out = torch.empty((num_tokens, width), dtype=table.dtype)
        row_bytes = width * table.element_size()
        bad = self._c["baton_embedding"](row_bytes, _pointer(ids), table.data_ptr(), out.data_ptr(), num_tokens, vocab_size)
        if bad >= 0:
            raise ValueError(f"token id {int(ids[bad])} at position {bad} is outside the vocabulary of {vocab_size}")
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        checks.check_norm(x, weight, rank=2)
        return self._rms_norm(x, weight, eps)

    def head_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        checks.check_norm(x, weight, rank=3)
        return self._rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        checks.check_norm(x, weight, rank=2)
        checks.check_tensor("residual", residual, x.dtype, x.shape)
        total = torch.empty_like(x)
        return self._rms_norm(x, weight, eps, _pointer(residual), total.data_ptr()), total

    def _rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: int | None = None, total: int | None = None
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        width = x.shape[-1]
        rows = x.numel() // max(width, 1)
        kind, threads = _kind("x", x), torch.get_num_threads()
        self._c["baton_rms_norm"](
            kind, x.data_ptr(), residual, _pointer(weight), eps, out.data_ptr(), total, rows, width, threads
        )
        return out

    def rope_(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        checks.check_rope(q, k, cos, sin)
        num_tokens, num_heads, head_dim = q.shape
        self._c["baton_rope"](
            _kind("q", q),
            q.data_ptr(),
            _pointer(k),
            _pointer(cos),
            _pointer(sin),
            num_tokens,
            num_heads,
            k.shape[1],
            head_dim,
            cos.shape[1],
            torch.get_num_threads(),
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        checks.check_gate_up(gate_up)
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_tokens, width), dtype=gate_up.dtype)
        self._c["baton_silu_mul"](
            _kind("gate_up", gate_up), gate_up.data_ptr(), out.data_ptr(), num_tokens, width, torch.get_num_threads()
        )
        return out

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor) -> None:
        checks.check_kv_write(k, v, cache, layer, slot_mapping)
        bad = self._c["baton_kv_write"](
            _kind("cache", cache), _pointer(k), _pointer(v), _cache(cache, layer), _pointer(slot_mapping), k.shape[0]
        )
        if bad >= 0:
            num_blocks, block_size = cache.shape[0], cache.shape[4]
            raise ValueError(f"slot {int(slot_mapping[bad])} at {bad} is outside the cache's {num_blocks} x {block_size} slots")

    def attention(
        self, q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMeta, scale: float, window: int | None
    ) -> torch.Tensor:
        checks.check_attention(q, cache, layer, meta, window)
        out = torch.empty_like(q)
        bad = self._c["baton_attention"](
            _kind("cache", cache),
            _pointer(q),
            _cache(cache, layer),
            _batch(meta),
            q.shape[1],
            scale,
            window or 0,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if bad >= 0:
            raise ValueError(_explain_bad_batch(meta, cache, bad))
        return out

    def gather_blocks(self, cache: torch.Tensor, block_ids: Sequence[int], out: memoryview) -> bytes:
        num_bytes = checks.check_block_copy(cache, block_ids, out, slab_is_written=True)
        ids, slab, lanes = np.array(block_ids, dtype=np.int64), np.frombuffer(out, dtype=np.uint8), _Lanes()
        block_bytes = num_bytes // max(len(ids), 1)
        self._c["baton_gather"](_pointer(cache), block_bytes, ids.ctypes.data, len(ids), slab.ctypes.data, lanes)
        return finish_digest(bytes(lanes), num_bytes)

    def scatter_blocks(self, src: memoryview, cache: torch.Tensor, block_ids: Sequence[int]) -> bytes:
        num_bytes = checks.check_block_copy(cache, block_ids, src, slab_is_written=False)
        ids, slab, lanes = np.array(block_ids, dtype=np.int64), np.frombuffer(src, dtype=np.uint8), _Lanes()
        block_bytes = num_bytes // max(len(ids), 1)
        self._c["baton_scatter"](slab.ctypes.data, _pointer(cache), block_bytes, ids.ctypes.data, len(ids), lanes)
        return finish_digest(bytes(lanes), num_bytes)


def _kind(what: str, tensor: torch.Tensor) -> int:
    """0 for fp32, 1 for bf16; refuses every other dtype and device."""
    kind = _IS_BF16.get(tensor.dtype)
    if kind is None or not tensor.is_cpu:
        raise ValueError(f"{what} must be float32 or bfloat16 on the cpu, got {tensor.dtype} on {tensor.device}")
    return kind


def _pointer(tensor: torch.Tensor) -> int:
    if not tensor.is_cpu:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} lies on {tensor.device}, native kernels need the cpu")
    return tensor.data_ptr()


def _cache(cache: torch.Tensor, layer: int) -> _Cache:
    num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = cache.shape
    return _Cache(_pointer(cache), num_blocks, num_layers, num_kv_heads, block_size, head_dim, layer)


def _batch(meta: AttentionMeta) -> _Batch:
    return _Batch(
        _pointer(meta.positions),
        _pointer(meta.query_starts),
        _pointer(meta.context_lens),
        _pointer(meta.block_tables),
        meta.positions.shape[0],
        meta.context_lens.shape[0],
        meta.block_tables.shape[1],
    )


def _explain_bad_batch(meta: AttentionMeta, cache: torch.Tensor, sequence: int) -> str:
    starts = meta.query_starts.tolist()
    if not meta.num_sequences or starts[0] != 0 or starts[-1] != meta.num_tokens:
        return f"query_starts {starts[:1]}..{starts[-1:]} do not cover the {meta.num_tokens} tokens of the step"
    rows = slice(starts[sequence], starts[sequence + 1])
    table, size = meta.block_tables[sequence].tolist(), f"{cache.shape[0]} blocks of {cache.shape[4]}"
    return (
        f"sequence {sequence}: rows {rows.start}..{rows.stop}, positions {meta.positions[rows].tolist()[:4]}, context "
        f"{int(meta.context_lens[sequence])}, block table {table[:8]} of {len(table)} do not fit a cache of {size}"
    )
