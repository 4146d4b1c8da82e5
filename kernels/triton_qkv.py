"""Everything between the QKV projection and attention as one Triton kernel: head norms, rotary embedding, KV write.

Owns the fused kernel, which rounds where the separate operations round, so that both ways give the same bits; arguments were
checked before. One program takes one token: qkv is read once, K and V go straight to their slot in the paged cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton_launch import ASSERT_INDEXES, aligned, on_device, padded, rounded, warps_for
from kernels.triton_rows import cache_offset, inverse_rms


@triton.jit
def _normed_and_turned(
    x_ptr: Any,
    norm_ptr: Any,
    cos_ptr: Any,
    sin_ptr: Any,
    eps: Any,
    head: Any,
    column: Any,
    inside: Any,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
) -> Any:
    """The heads [H, W] at x_ptr after norm and rotation by the angles of one row, in the dtype that x_ptr names."""
    is_first = column < HALF
    is_turned = column < 2 * HALF
    # Each dim's partner in the rotation is loaded a second time (from cache), so that no values change threads.
    partner = tl.where(is_first, column + HALF, tl.where(is_turned, column - HALF, column))
    x = tl.load(x_ptr + head * HEAD_DIM + column, mask=inside, other=0.0)
    other = tl.load(x_ptr + head * HEAD_DIM + partner, mask=inside, other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        factor = inverse_rms(wide, eps, HEAD_DIM)
        weight = tl.load(norm_ptr + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
        other_weight = tl.load(norm_ptr + partner, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
        x = rounded(wide * factor * weight, x_ptr.dtype.element_ty)
        other = rounded(other.to(tl.float32) * factor * other_weight, x_ptr.dtype.element_ty)
    angle = tl.where(is_first, column, column - HALF)
    cos = tl.load(cos_ptr + angle, mask=is_turned, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=is_turned, other=0.0)
    own, opposite = x.to(tl.float32) * cos, other.to(tl.float32) * sin
    turned = rounded(tl.where(is_first, own - opposite, own + opposite), x_ptr.dtype.element_ty)
    return tl.where(is_turned, turned, x)


@triton.jit(do_not_specialize=["layer", "num_slots"])
def _prepare_qkv(
    qkv_ptr: Any,
    query_norm_ptr: Any,
    key_norm_ptr: Any,
    cos_ptr: Any,
    sin_ptr: Any,
    positions_ptr: Any,
    slots_ptr: Any,
    q_ptr: Any,
    cache_ptr: Any,
    eps: Any,
    layer: Any,
    num_layers: Any,
    num_slots: Any,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row)
    slot = tl.load(slots_ptr + row)
    known = (slot >= 0) & (slot < num_slots)
    tl.device_assert(known, "slot outside the KV cache")
    cos_ptr += position * HALF
    sin_ptr += position * HALF
    column = tl.arange(0, WIDTH)[None, :]
    qkv_ptr += row * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)

    head = tl.arange(0, HEADS)[:, None]
    inside = (head < NUM_HEADS) & (column < HEAD_DIM)
    q = _normed_and_turned(qkv_ptr, query_norm_ptr, cos_ptr, sin_ptr, eps, head, column, inside, HAS_NORM, HEAD_DIM, HALF)
    tl.store(q_ptr + row * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + column, q, mask=inside)

    kv_head = tl.arange(0, KV_HEADS)[:, None]
    kv_inside = (kv_head < NUM_KV_HEADS) & (column < HEAD_DIM)
    k_ptr = qkv_ptr + NUM_HEADS * HEAD_DIM
    k = _normed_and_turned(k_ptr, key_norm_ptr, cos_ptr, sin_ptr, eps, kv_head, column, kv_inside, HAS_NORM, HEAD_DIM, HALF)
    base = cache_offset(slot, layer, num_layers, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    target = base + kv_head * (BLOCK_SIZE * HEAD_DIM) + column
    tl.store(cache_ptr + target, k, mask=kv_inside & known)
    v = tl.load(k_ptr + (NUM_KV_HEADS + kv_head) * HEAD_DIM + column, mask=kv_inside)
    tl.store(cache_ptr + target + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, v, mask=kv_inside & known)


def prepare_qkv(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Queries [T, Hq, D] of qkv [T, (Hq + 2 Hkv) D], ready for attention; K and V of the T rows are in the cache afterwards.

    norms: weights [D] of the query and key norm; cos, sin fp32 [P, Dr/2] by position; positions, slot_mapping int64 [T];
    cache [B, L, 2, Hkv, block_size, D].
    """
    num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = cache.shape
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return q
    heads, kv_heads, width = padded(num_heads), padded(num_kv_heads), padded(head_dim)
    query_norm, key_norm = (qkv, qkv) if norms is None else norms
    with on_device(qkv.device):
        _prepare_qkv[(num_tokens,)](
            aligned(qkv),
            query_norm,
            key_norm,
            cos,
            sin,
            positions,
            slot_mapping,
            q,
            cache,
            eps,
            layer,
            num_layers,
            num_blocks * block_size,
            norms is not None,
            num_heads,
            heads,
            num_kv_heads,
            kv_heads,
            block_size,
            head_dim,
            cos.shape[1],
            width,
            num_warps=warps_for(heads * width),
            **ASSERT_INDEXES,
        )
    return q
