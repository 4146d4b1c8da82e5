"""Everything between the QKV projection and attention as one Triton kernel: head norms, rotary embedding, KV write.

Owns the fused kernel, which reduces the same tiles and rounds where the separate operations do. Their bits are equal in the
interpreter; on a GPU a test has yet to show whether the compiler lays out both sums of a head norm alike. Arguments
were checked before. A program takes a tile of heads of any tokens: qkv is read once, K and V go straight to their slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_launch import ASSERT_INDEXES, on_device, padded, rounded, warps_for
from kernels.triton_rows import HEAD_ROWS, cache_offset, inverse_rms


@triton.jit(do_not_specialize=["num_rows", "num_slots", "layer"])
def _prepare_qkv(
    qkv_ptr,
    query_norm_ptr,
    key_norm_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    q_ptr,
    cache_ptr,
    num_rows,
    num_slots,
    eps,
    layer,
    num_layers,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Row r of the tiles is head r % (Hq + 2 Hkv) of token r // (Hq + 2 Hkv): query heads, then keys, then values."""
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    is_row = row < num_rows
    inside = is_row & (column < HEAD_DIM)
    token, head = row // ALL_HEADS, row % ALL_HEADS
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS

    # A dim's partner in the rotation is loaded a second time (it is in the cache by then), so that no value changes threads.
    is_first = column < HALF
    is_turned = column < 2 * HALF
    partner = tl.where(is_first, column + HALF, tl.where(is_turned, column - HALF, column))
    plain = tl.load(qkv_ptr + row * HEAD_DIM + column, mask=inside, other=0.0)
    x = plain
    opposite = tl.load(qkv_ptr + row * HEAD_DIM + partner, mask=inside, other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        factor = inverse_rms(wide, eps, HEAD_DIM)
        of_query, of_key = inside & is_query, inside & (head >= NUM_HEADS)
        weight = tl.load(query_norm_ptr + column, mask=of_query, other=0.0).to(tl.float32)
        weight += tl.load(key_norm_ptr + column, mask=of_key, other=0.0).to(tl.float32)
        opposite_weight = tl.load(query_norm_ptr + partner, mask=of_query, other=0.0).to(tl.float32)
        opposite_weight += tl.load(key_norm_ptr + partner, mask=of_key, other=0.0).to(tl.float32)
        x = rounded(wide * factor * weight, dtype)
        opposite = rounded(opposite.to(tl.float32) * factor * opposite_weight, dtype)
    position = tl.load(positions_ptr + token, mask=is_row, other=0)
    angle = position * HALF + tl.where(is_first, column, column - HALF)
    cos = tl.load(cos_ptr + angle, mask=is_row & is_turned, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=is_row & is_turned, other=0.0)
    along, across = x.to(tl.float32) * cos, opposite.to(tl.float32) * sin
    turned = rounded(tl.where(is_first, along - across, along + across), dtype)
    x = tl.where(is_turned, turned, x)

    tl.store(q_ptr + (token * NUM_HEADS + head) * HEAD_DIM + column, x, mask=inside & is_query)
    slot = tl.load(slots_ptr + token, mask=is_row, other=0)
    is_slot = (slot >= 0) & (slot < num_slots)
    tl.device_assert(is_slot, "slot outside the KV cache")
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    target = cache_offset(slot, kv_head, layer, num_layers, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM) + column
    target += tl.where(is_value, NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, 0)
    tl.store(cache_ptr + target, tl.where(is_value, plain, x), mask=inside & is_slot & (head >= NUM_HEADS))


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
    num_tokens, all_heads = qkv.shape[0], qkv.shape[1] // head_dim
    num_heads = all_heads - 2 * num_kv_heads
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    num_rows = num_tokens * all_heads
    if not num_rows:
        return q
    query_norm, key_norm = (qkv, qkv) if norms is None else norms
    width = padded(head_dim)
    with on_device(qkv.device):
        _prepare_qkv[(triton.cdiv(num_rows, HEAD_ROWS),)](
            qkv,
            query_norm,
            key_norm,
            cos,
            sin,
            positions,
            slot_mapping,
            q,
            cache,
            num_rows,
            num_blocks * block_size,
            eps,
            layer,
            num_layers,
            HAS_NORM=norms is not None,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim,
            HALF=cos.shape[1],
            ROWS=HEAD_ROWS,
            WIDTH=width,
            num_warps=warps_for(HEAD_ROWS * width),
            **ASSERT_INDEXES,
        )
    return q
