"""Row-wise Triton kernels: RMS norms, SiLU gate, rotary embedding and the write of new KV into the paged cache.

Owns one kernel per operation and its launch; arguments were checked before (kernels/triton_ops.py). A program computes a tile of
rows whose shape depends on the model's extents only, so a row's bits do not depend on how many rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_launch import ASSERT_INDEXES, ROUND_EACH, aligned, on_device, padded, rounded, warps_for

HEAD_ROWS = 16
"""Heads (of any tokens) in a tile: one number for all kernels that work on heads, so that all reduce a head alike."""
_ROW_VALUES = 2048  # narrower rows share a program


@triton.jit
def inverse_rms(x, eps, EXTENT: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of x fp32 [R, W] over its last axis, which holds zeros beyond EXTENT -> [R, 1]."""
    return tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / EXTENT + eps)


@triton.jit
def cache_offset(slot, head, layer, num_layers, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where a head's K at `slot` (int64) begins in a cache [B, L, 2, Hkv, block_size, D], in elements."""
    plane = (slot // BLOCK_SIZE * num_layers + layer) * 2 * NUM_KV_HEADS + head
    return (plane * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    num_rows,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    EXTENT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < num_rows) & (column < EXTENT)
    at = row * EXTENT + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = rounded(x + residual, total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < EXTENT, other=0.0).to(tl.float32)
    out = x * inverse_rms(x, eps, EXTENT) * weight
    tl.store(out_ptr + at, rounded(out, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, EXTENT: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < EXTENT
    gate = tl.load(gate_up_ptr + row * (2 * EXTENT) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * EXTENT) + EXTENT + column, mask=inside, other=0.0).to(tl.float32)
    decay = tl.exp(-tl.abs(gate))  # at most 1: no overflow for any gate
    silu = gate * tl.where(gate >= 0, 1.0, decay) / (1.0 + decay)
    tl.store(out_ptr + row * EXTENT + column, rounded(silu * up, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    num_rows,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < num_rows) & (column < HALF)
    at = row * HEAD_DIM + column
    angle = row // NUM_HEADS * HALF + column
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    first = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + at, rounded(first * cos - second * sin, x_ptr.dtype.element_ty), mask=inside)
    tl.store(x_ptr + at + HALF, rounded(second * cos + first * sin, x_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_slots", "layer"])
def _kv_write(
    k_ptr,
    v_ptr,
    cache_ptr,
    slots_ptr,
    num_rows,
    num_slots,
    layer,
    num_layers,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    slot = tl.load(slots_ptr + row // NUM_KV_HEADS, mask=row < num_rows, other=0)
    is_slot = (slot >= 0) & (slot < num_slots)
    tl.device_assert(is_slot, "slot outside the KV cache")
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < num_rows) & (column < HEAD_DIM)
    target = cache_offset(slot, row % NUM_KV_HEADS, layer, num_layers, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM) + column
    k = tl.load(k_ptr + row * HEAD_DIM + column, mask=inside)
    v = tl.load(v_ptr + row * HEAD_DIM + column, mask=inside)
    tl.store(cache_ptr + target, k, mask=inside & is_slot)
    tl.store(cache_ptr + target + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, v, mask=inside & is_slot)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H] -> [T, H]."""
    rows = max(1, _ROW_VALUES // padded(x.shape[1]))
    return _launch_rms_norm(x, None, weight, eps, rows)[0]


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, H] -> (rms_norm(sum), sum), the sum rounded to the dtype before it is normalised."""
    rows = max(1, _ROW_VALUES // padded(x.shape[1]))
    return _launch_rms_norm(x, residual, weight, eps, rows)


def head_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, Hn, D] -> each head normalised by itself."""
    return _launch_rms_norm(x.view(-1, x.shape[2]), None, weight, eps, HEAD_ROWS)[0].view(x.shape)


def _launch_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = aligned(x), torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    num_rows, extent = x.shape
    if num_rows:
        width = padded(extent)
        with on_device(x.device):
            _rms_norm[(triton.cdiv(num_rows, rows),)](
                x,
                x if residual is None else aligned(residual),
                aligned(weight),
                out,
                total,
                num_rows,
                eps,
                HAS_RESIDUAL=residual is not None,
                ROWS=rows,
                EXTENT=extent,
                WIDTH=width,
                num_warps=warps_for(rows * width),
                **ROUND_EACH,
            )
    return out, total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I] -> [T, I]."""
    num_tokens, extent = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, extent), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        width = min(_ROW_VALUES, padded(extent))
        grid = (num_tokens, triton.cdiv(extent, width))
        with on_device(gate_up.device):
            _silu_mul[grid](gate_up, out, EXTENT=extent, WIDTH=width, num_warps=warps_for(width), **ROUND_EACH)
    return out


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the first Dr dims of x [T, Hn, D] in place; cos, sin fp32 [T, Dr/2]."""
    num_tokens, num_heads, head_dim = x.shape
    num_rows, half = num_tokens * num_heads, cos.shape[1]
    if num_rows and half:
        width = padded(half)
        with on_device(x.device):
            _rotate[(triton.cdiv(num_rows, HEAD_ROWS),)](
                x,
                cos,
                sin,
                num_rows,
                NUM_HEADS=num_heads,
                HEAD_DIM=head_dim,
                HALF=half,
                ROWS=HEAD_ROWS,
                WIDTH=width,
                num_warps=warps_for(2 * HEAD_ROWS * width),
                **ROUND_EACH,
            )


def kv_write(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor) -> None:
    """Stores k, v [T, Hkv, D] at slots [T] of cache [B, L, 2, Hkv, block_size, D]."""
    num_tokens, num_kv_heads, head_dim = k.shape
    num_blocks, num_layers, _, _, block_size, _ = cache.shape
    num_rows = num_tokens * num_kv_heads
    if num_rows:
        width = padded(head_dim)
        with on_device(k.device):
            _kv_write[(triton.cdiv(num_rows, HEAD_ROWS),)](
                k,
                v,
                cache,
                slot_mapping,
                num_rows,
                num_blocks * block_size,
                layer,
                num_layers,
                NUM_KV_HEADS=num_kv_heads,
                BLOCK_SIZE=block_size,
                HEAD_DIM=head_dim,
                ROWS=HEAD_ROWS,
                WIDTH=width,
                num_warps=warps_for(HEAD_ROWS * width),
                **ASSERT_INDEXES,
            )
