"""The operations as C++ kernels on the CPU, called through ctypes with the GIL released.

Owns the checks between Python and raw pointers (every shape, dtype, contiguity and index bound; a wrong pointer never reaches C)
and the choice of threads; the arithmetic lies in kernels/cpu. fp32 and bf16; results of a row do not depend on the other rows,
on chunking or on the number of threads, bit for bit.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels import checks
from kernels.digest import finish_digest
from kernels.native_build import InstructionSet, NativeLibrary, NativeUnavailable, instruction_sets_here, load_library
from kernels.native_decoder import NativeDecoder
from kernels.native_structs import (
    IS_BF16,
    Batch,
    Cache,
    Decoder,
    DrawStruct,
    Step,
    batch_struct,
    cache_struct,
    explain_bad_batch,
    kind_of,
    pointer_of,
)
from kernels.ops import AttentionMeta, DecoderWeights, Draw, PackedLinear

PANEL = 16
CHECK_TIMEOUT_S = 120.0
_log = logging.getLogger(__name__)


_Lanes = c_uint64 * 16
_P, _N, _I = c_void_p, c_int64, c_int
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "baton_layout": ([_I], c_char_p),
    "baton_panel_inputs": ([_I, _N], c_int64),
    "baton_pack_linear": ([_I, _P, _P, _N, _N, _I], None),
    "baton_linear": ([_I, _P, _P, _P, _P, _N, _N, _N, _I], None),
    "baton_logits": ([_I, _P, _P, _P, _P, _N, _N, _N, _I], None),
    "baton_embedding": ([_N, _P, _P, _P, _N, _N], c_int64),
    "baton_rms_norm": ([_I, _P, _P, _P, c_float, _P, _P, _N, _N, _I], None),
    "baton_rope": ([_I, _P, _P, _P, _P, _N, _N, _N, _N, _N, _I], None),
    "baton_silu_mul": ([_I, _P, _P, _N, _N, _I], None),
    "baton_kv_write": ([_I, _P, _P, POINTER(Cache), _P, _N], c_int64),
    "baton_attention": ([_I, _P, POINTER(Cache), POINTER(Batch), _N, c_float, _N, _P, _I], c_int64),
    "baton_decoder_work": ([POINTER(Decoder), _N], c_int64),
    "baton_decoder_step": ([POINTER(Decoder), POINTER(Cache), POINTER(Step), _P, _P, _I], c_int64),
    "baton_sample": ([_P, _N, _N, POINTER(DrawStruct), POINTER(c_int64), _I], None),
    "baton_gather": ([_P, _N, _P, _N, _P, POINTER(c_uint64)], None),
    "baton_scatter": ([_P, _P, _N, _P, _N, POINTER(c_uint64)], None),
}


class NativeOps:
    """The C++ kernels. Raises NativeUnavailable when they cannot be built or loaded, or do not serve `dtype`."""

    def __init__(self, dtype: torch.dtype, library: NativeLibrary | None = None) -> None:
        if dtype not in IS_BF16:
            raise NativeUnavailable(f"native kernels serve {', '.join(map(str, IS_BF16))}, not {dtype}")
        self._library = _load_trusted() if library is None else library
        functions: dict[str, Callable[..., Any]] = {}
        for name, (argument_types, result_type) in _SIGNATURES.items():
            function = getattr(self._library.handle, name)
            function.argtypes, function.restype = argument_types, result_type
            functions[name] = function
        self._c = functions
        layouts = {kind: functions["baton_layout"](kind).decode() for kind in IS_BF16.values()}
        self._layouts = {dtype_: layouts[kind] for dtype_, kind in IS_BF16.items()}

    @property
    def name(self) -> str:
        return "native"

    def describe(self) -> str:
        return f"native (C++, {self._library.instruction_set}, {torch.get_num_threads()} threads): {self._library.path}"

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        checks.check_pack(weight, bias)
        kind = kind_of("weight", weight)
        num_outputs, num_inputs = weight.shape
        num_panels = -(-num_outputs // PANEL)
        packed = torch.empty((num_panels, self._c["baton_panel_inputs"](kind, num_inputs), PANEL), dtype=weight.dtype)
        self._c["baton_pack_linear"](kind, weight.data_ptr(), packed.data_ptr(), num_outputs, num_inputs, torch.get_num_threads())
        return PackedLinear(packed, bias, num_outputs, num_inputs, self._layouts[weight.dtype])

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        out = torch.empty((x.shape[0], packed.num_outputs), dtype=x.dtype)
        return self._multiply("baton_linear", x, packed, out)

    def logits(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        out = torch.empty((x.shape[0], packed.num_outputs), dtype=torch.float32)
        return self._multiply("baton_logits", x, packed, out)

    def _multiply(self, function: str, x: torch.Tensor, packed: PackedLinear, out: torch.Tensor) -> torch.Tensor:
        checks.check_linear(x, packed, self._layouts.get(packed.weight.dtype, "nothing"))
        bias = None if packed.bias is None else packed.bias.data_ptr()
        rows, threads = x.shape[0], torch.get_num_threads()
        weight, num_outputs, num_inputs = packed.weight.data_ptr(), packed.num_outputs, packed.num_inputs
        self._c[function](kind_of("x", x), pointer_of(x), weight, bias, out.data_ptr(), rows, num_outputs, num_inputs, threads)
        return out

    def embedding(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        checks.check_embedding(ids, table)
        kind_of("table", table)
        num_tokens, (vocab_size, width) = ids.shape[0], table.shape
        out = torch.empty((num_tokens, width), dtype=table.dtype)
        row_bytes = width * table.element_size()
        bad = self._c["baton_embedding"](row_bytes, pointer_of(ids), table.data_ptr(), out.data_ptr(), num_tokens, vocab_size)
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
        return self._rms_norm(x, weight, eps, pointer_of(residual), total.data_ptr()), total

    def _rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: int | None = None, total: int | None = None
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        width = x.shape[-1]
        rows = x.numel() // max(width, 1)
        kind, threads = kind_of("x", x), torch.get_num_threads()
        self._c["baton_rms_norm"](
            kind, x.data_ptr(), residual, pointer_of(weight), eps, out.data_ptr(), total, rows, width, threads
        )
        return out

    def rope_(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        checks.check_rope(q, k, cos, sin)
        num_tokens, num_heads, head_dim = q.shape
        self._c["baton_rope"](
            kind_of("q", q),
            q.data_ptr(),
            pointer_of(k),
            pointer_of(cos),
            pointer_of(sin),
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
            kind_of("gate_up", gate_up), gate_up.data_ptr(), out.data_ptr(), num_tokens, width, torch.get_num_threads()
        )
        return out

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor) -> None:
        checks.check_kv_write(k, v, cache, layer, slot_mapping)
        bad = self._c["baton_kv_write"](
            kind_of("cache", cache),
            pointer_of(k),
            pointer_of(v),
            cache_struct(cache, layer),
            pointer_of(slot_mapping),
            k.shape[0],
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
            kind_of("cache", cache),
            pointer_of(q),
            cache_struct(cache, layer),
            batch_struct(meta),
            q.shape[1],
            scale,
            window or 0,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if bad >= 0:
            raise ValueError(explain_bad_batch(meta, cache, bad))
        return out

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        checks.check_sample(logits, len(draws))
        rows, vocab_size = logits.shape
        structs = (DrawStruct * rows)(*(DrawStruct(d.temperature, d.top_p, d.min_p, d.noise, d.top_k) for d in draws))
        tokens = (c_int64 * rows)()
        self._c["baton_sample"](pointer_of(logits), rows, vocab_size, structs, tokens, torch.get_num_threads())
        return checks.check_sampled(list(tokens))

    def fuse_decoder(self, decoder: DecoderWeights) -> NativeDecoder:
        return NativeDecoder(
            decoder, self._layouts[decoder.embedding.dtype], self._c["baton_decoder_work"], self._c["baton_decoder_step"]
        )

    def gather_blocks(self, cache: torch.Tensor, block_ids: Sequence[int], out: memoryview) -> bytes:
        num_bytes = checks.check_block_copy(cache, block_ids, out, slab_is_written=True)
        ids, slab, lanes = np.array(block_ids, dtype=np.int64), np.frombuffer(out, dtype=np.uint8), _Lanes()
        block_bytes = num_bytes // max(len(ids), 1)
        self._c["baton_gather"](pointer_of(cache), block_bytes, ids.ctypes.data, len(ids), slab.ctypes.data, lanes)
        return finish_digest(bytes(lanes), num_bytes)

    def scatter_blocks(self, src: memoryview, cache: torch.Tensor, block_ids: Sequence[int]) -> bytes:
        num_bytes = checks.check_block_copy(cache, block_ids, src, slab_is_written=False)
        ids, slab, lanes = np.array(block_ids, dtype=np.int64), np.frombuffer(src, dtype=np.uint8), _Lanes()
        block_bytes = num_bytes // max(len(ids), 1)
        self._c["baton_scatter"](slab.ctypes.data, pointer_of(cache), block_bytes, ids.ctypes.data, len(ids), lanes)
        return finish_digest(bytes(lanes), num_bytes)


def _load_trusted() -> NativeLibrary:
    """The library for the fastest instruction set whose arithmetic is right on this CPU, tried once.

    We cannot run every instruction set where we test, and a hypervisor may promise what it does not keep: a library that
    computes wrongly or is refused by the system is left out with a warning, and the next one is taken.
    """
    reasons: list[str] = []
    for isa in instruction_sets_here():
        try:
            library = load_library(isa)
            if isa.has_run_here:
                check_arithmetic(library)
            else:
                _check_apart(isa, library)
        except NativeUnavailable as error:
            reasons.append(f"{isa.name}: {error}")
            continue
        if reasons:
            _log.warning("native kernels use %s, because of %s", isa.name, "; ".join(reasons))
        return library
    raise NativeUnavailable("; ".join(reasons))


def check_arithmetic(library: NativeLibrary) -> None:
    """Small products of each dtype against fp64. Raises NativeUnavailable."""
    generator = torch.Generator().manual_seed(0)
    for dtype in IS_BF16:
        ops = NativeOps(dtype, library)
        weight = torch.randn(37, 70, generator=generator).to(dtype)
        packed = ops.pack_linear(weight, None)
        for num_rows in (1, 2, 3, 7, 37):
            x = torch.randn(num_rows, 70, generator=generator).to(dtype)
            error = (ops.logits(x, packed).double() - x.double() @ weight.double().T).abs().max().item()
            if not error < 1e-4:
                raise NativeUnavailable(f"products of {num_rows} rows of {dtype} are wrong by {error:.3g} on this CPU")


def _check_apart(isa: InstructionSet, library: NativeLibrary) -> None:
    """The same check in a process of its own, which an illegal instruction may end. A mark beside the library spares the next
    start two seconds. Raises NativeUnavailable."""
    mark = library.path.with_name("checked")
    if mark.exists():
        return
    program = (
        "import sys; from kernels.native import check_arithmetic; from kernels.native_build import INSTRUCTION_SETS, load_library\n"
        f"check_arithmetic(load_library(next(isa for isa in INSTRUCTION_SETS if isa.name == {isa.name!r})))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, sys.path)])}
    try:
        result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"checking its arithmetic took longer than {CHECK_TIMEOUT_S:.0f} s") from error
    if result.returncode != 0:
        last_line = result.stderr.strip().rpartition("\n")[2][:300]
        raise NativeUnavailable(f"checking its arithmetic ended with code {result.returncode}: {last_line}")
    mark.touch()
