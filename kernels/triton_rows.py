"""Row-wise Triton kernels: RMS norms, SiLU gate, rotary embedding and the write of new KV into the paged cache.

Owns one kernel per operation and its launch; arguments were checked before (kernels/triton_ops.py). One program computes one
token, whose tile depends on the model's extents only, so a row's bits do not depend on how many rows there are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton_launch import ASSERT_INDEXES, ROUND_EACH, aligned, on_device, padded, rounded, warps_for


@triton.jit
def inverse_rms(x: Any, eps: Any, EXTENT: tl.constexpr) -> Any:
    """1 / sqrt(mean(x^2) + eps) of x fp32 [..., W] over its last axis, which holds zeros beyond EXTENT; keeps that axis."""
    return tl.rsqrt(tl.sum(x * x, axis=len(x.shape) - 1, keep_dims=True) / EXTENT + eps)


@triton.jit
def cache_offset(
    slot: Any, layer: Any, num_layers: Any, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
) -> Any:
    """Where head 0 of K at `slot` (int64) begins in a cache [B, L, 2, Hkv, block_size, D], in elements."""
    block = slot // BLOCK_SIZE
    return ((block * num_layers + layer) * 2 * NUM_KV_HEADS * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def _rms_norm(
    x_ptr: Any,
    residual_ptr: Any,
    weight_ptr: Any,
    out_ptr: Any,
    total_ptr: Any,
    eps: Any,
    HAS_RESIDUAL: tl.constexpr,
    EXTENT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * EXTENT + tl.arange(0, WIDTH)
    column = tl.arange(0, WIDTH)
    inside = column < EXTENT
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = rounded(x + residual, total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    out = x * inverse_rms(x, eps, EXTENT) * weight
    tl.store(out_ptr + at, rounded(out, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _head_rms_norm(
    x_ptr: Any,
    weight_ptr: Any,
    out_ptr: Any,
    eps: Any,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < NUM_HEADS) & (column < HEAD_DIM)
    at = tl.program_id(0).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    out = x * inverse_rms(x, eps, HEAD_DIM) * weight
    tl.store(out_ptr + at, rounded(out, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(gate_up_ptr: Any, out_ptr: Any, EXTENT: tl.constexpr, WIDTH: tl.constexpr) -> None:
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < EXTENT
    gate = tl.load(gate_up_ptr + row * (2 * EXTENT) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * EXTENT) + EXTENT + column, mask=inside, other=0.0).to(tl.float32)
    decay = tl.exp(-tl.abs(gate))  # at most 1: no overflow for any gate
    silu = gate * tl.where(gate >= 0, 1.0, decay) / (1.0 + decay)
    tl.store(out_ptr + row * EXTENT + column, rounded(silu * up, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    x_ptr: Any,
    cos_ptr: Any,
    sin_ptr: Any,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < NUM_HEADS) & (column < HALF)
    at = row * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + column
    cos = tl.load(cos_ptr + row * HALF + column, mask=column < HALF, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + column, mask=column < HALF, other=0.0)
    first = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + at, rounded(first * cos - second * sin, x_ptr.dtype.element_ty), mask=inside)
    tl.store(x_ptr + at + HALF, rounded(second * cos + first * sin, x_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["layer", "num_slots"])
def _kv_write(
    k_ptr: Any,
    v_ptr: Any,
    cache_ptr: Any,
    slots_ptr: Any,
    layer: Any,
    num_layers: Any,
    num_slots: Any,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    known = (slot >= 0) & (slot < num_slots)
    tl.device_assert(known, "slot outside the KV cache")
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < NUM_KV_HEADS) & (column < HEAD_DIM)
    source = (row * NUM_KV_HEADS + head) * HEAD_DIM + column
    base = cache_offset(slot, layer, num_layers, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    target = base + head * (BLOCK_SIZE * HEAD_DIM) + column
    tl.store(cache_ptr + target, tl.load(k_ptr + source, mask=inside), mask=inside & known)
    target += NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    tl.store(cache_ptr + target, tl.load(v_ptr + source, mask=inside), mask=inside & known)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H] -> [T, H]."""
    return _launch_rms_norm(x, None, weight, eps)[0]


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, H] -> (rms_norm(sum), sum), the sum rounded to the dtype before it is normalised."""
    return _launch_rms_norm(x, residual, weight, eps)


def _launch_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = aligned(x), torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    num_tokens, extent = x.shape
    if num_tokens:
        width = padded(extent)
        with on_device(x.device):
            _rms_norm[(num_tokens,)](
                x,
                x if residual is None else aligned(residual),
                aligned(weight),
                out,
                total,
                eps,
                HAS_RESIDUAL=residual is not None,
                EXTENT=extent,
                WIDTH=width,
                num_warps=warps_for(width),
                **ROUND_EACH,
            )
    return out, total


def head_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, Hn, D] -> each head normalised by itself."""
    x, out = aligned(x), torch.empty_like(x)
    num_tokens, num_heads, head_dim = x.shape
    if num_tokens:
        heads, width = padded(num_heads), padded(head_dim)
        with on_device(x.device):
            _head_rms_norm[(num_tokens,)](
                x,
                aligned(weight),
                out,
                eps,
                num_heads,
                heads,
                head_dim,
                width,
                num_warps=warps_for(heads * width),
                **ROUND_EACH,
            )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I] -> [T, I]."""
    num_tokens, extent = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, extent), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        width = min(2048, padded(extent))
        grid = (num_tokens, triton.cdiv(extent, width))
        with on_device(gate_up.device):
            _silu_mul[grid](gate_up, out, extent, width, num_warps=warps_for(width), **ROUND_EACH)
    return out


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the first Dr dims of x [T, Hn, D] in place; cos, sin fp32 [T, Dr/2]."""
    num_tokens, num_heads, head_dim = x.shape
    half = cos.shape[1]
    if num_tokens and half:
        heads, width = padded(num_heads), padded(half)
        with on_device(x.device):
            _rotate[(num_tokens,)](
                x, cos, sin, num_heads, heads, head_dim, half, width, num_warps=warps_for(2 * heads * width), **ROUND_EACH
            )


def kv_write(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor) -> None:
    """Stores k, v [T, Hkv, D] at slots [T] of cache [B, L, 2, Hkv, block_size, D]."""
    num_tokens, num_kv_heads, head_dim = k.shape
    num_blocks, num_layers, _, _, block_size, _ = cache.shape
    if num_tokens:
        heads, width = padded(num_kv_heads), padded(head_dim)
        with on_device(k.device):
            _kv_write[(num_tokens,)](
                k,
                v,
                cache,
                slot_mapping,
                layer,
                num_layers,
                num_blocks * block_size,
                num_kv_heads,
                heads,
                block_size,
                head_dim,
                width,
                num_warps=warps_for(heads * width),
                **ASSERT_INDEXES,
            )
