"""Shape, dtype and contiguity checks of every operation, shared by all implementations, with the quantities in the message.

A kernel that gets a wrong pointer or a wrong extent corrupts memory silently, so nothing reaches one unchecked. These run for
each call of each layer: plain comparisons, no tensor arithmetic, no device synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.ops import AttentionMeta, PackedLinear


def check_tensor(what: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Raises ValueError unless `tensor` is contiguous and has exactly this dtype and shape."""
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{what} must be contiguous {dtype} of shape {tuple(shape)}, got {tensor.dtype} of shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )


def check_rank(what: str, tensor: torch.Tensor, rank: int) -> None:
    if tensor.dim() != rank or not tensor.is_contiguous():
        raise ValueError(
            f"{what} must be contiguous with {rank} dimensions, got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def check_linear(x: torch.Tensor, packed: PackedLinear, layout: str) -> None:
    if packed.layout != layout:
        raise ValueError(f"weights are packed as {packed.layout!r}, this implementation packs {layout!r}")
    check_rank("x", x, 2)
    check_tensor("x", x, packed.weight.dtype, (x.shape[0], packed.num_inputs))


def check_pack(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    check_rank("weight", weight, 2)
    if bias is not None:
        check_tensor("bias", bias, weight.dtype, (weight.shape[0],))


def check_embedding(ids: torch.Tensor, table: torch.Tensor) -> None:
    check_rank("table", table, 2)
    check_tensor("ids", ids, torch.int64, (ids.numel(),))


def check_norm(x: torch.Tensor, weight: torch.Tensor, rank: int) -> None:
    check_rank("x", x, rank)
    check_tensor("weight", weight, x.dtype, (x.shape[-1],))


def check_rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    check_rank("q", q, 3)
    check_rank("k", k, 3)
    num_tokens, _, head_dim = q.shape
    check_tensor("k", k, q.dtype, (num_tokens, k.shape[1], head_dim))
    check_rank("cos", cos, 2)
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(f"rope rotates {2 * cos.shape[1]} dims, heads have {head_dim}")
    check_tensor("cos", cos, torch.float32, (num_tokens, cos.shape[1]))
    check_tensor("sin", sin, torch.float32, (num_tokens, cos.shape[1]))


def check_gate_up(gate_up: torch.Tensor) -> None:
    check_rank("gate_up", gate_up, 2)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must hold two equal halves, got {gate_up.shape[1]} columns")


def check_cache(cache: torch.Tensor, layer: int) -> None:
    check_rank("cache", cache, 6)
    if cache.shape[2] != 2:
        raise ValueError(f"cache must be [B, L, 2, Hkv, block_size, D], got {tuple(cache.shape)}")
    if not 0 <= layer < cache.shape[1]:
        raise ValueError(f"layer {layer} is outside the cache's {cache.shape[1]} layers")


def check_kv_write(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor) -> None:
    check_cache(cache, layer)
    expected = (slot_mapping.numel(), cache.shape[3], cache.shape[5])
    check_tensor("slot_mapping", slot_mapping, torch.int64, expected[:1])
    check_tensor("k", k, cache.dtype, expected)
    check_tensor("v", v, cache.dtype, expected)


def check_attention(q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMeta, window: int | None) -> None:
    check_cache(cache, layer)
    check_rank("q", q, 3)
    check_tensor("q", q, cache.dtype, (meta.num_tokens, q.shape[1], cache.shape[5]))
    if q.shape[1] == 0 or q.shape[1] % cache.shape[3]:
        raise ValueError(f"{q.shape[1]} query heads do not divide over {cache.shape[3]} KV heads")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")


def check_block_copy(cache: torch.Tensor, block_ids: Sequence[int], slab: memoryview, slab_is_written: bool) -> int:
    """Checks a gather or scatter; returns the number of payload bytes at the start of the slab."""
    check_rank("cache", cache, 6)
    num_blocks = cache.shape[0]
    if len(block_ids) and (min(block_ids) < 0 or max(block_ids) >= num_blocks):
        raise ValueError(f"block ids {min(block_ids)}..{max(block_ids)} are outside the cache's {num_blocks} blocks")
    if not slab_is_written and len(set(block_ids)) != len(block_ids):
        raise ValueError(f"scatter into {len(block_ids)} blocks names only {len(set(block_ids))} distinct ones")
    block_bytes = cache.numel() // max(num_blocks, 1) * cache.element_size()
    num_bytes = block_bytes * len(block_ids)
    if not slab.c_contiguous or slab.nbytes < num_bytes:
        raise ValueError(
            f"slab of {slab.nbytes} bytes (contiguous: {slab.c_contiguous}) cannot hold {len(block_ids)} x {block_bytes} bytes"
        )
    if slab_is_written and slab.readonly:
        raise ValueError("the slab to gather into is read-only")
    return num_bytes


def check_sample(logits: torch.Tensor, num_draws: int) -> None:
    check_rank("logits", logits, 2)
    check_tensor("logits", logits, torch.float32, (num_draws, logits.shape[1]))


def check_sampled(token_ids: list[int]) -> list[int]:
    """Raises FloatingPointError for the rows that gave no token (-1)."""
    broken = [row for row, token_id in enumerate(token_ids) if token_id < 0]
    if broken:
        raise FloatingPointError(f"logits of sample rows {broken} have no finite maximum")
    return token_ids
