"""Index checks before a Triton launch, for indexes that lie on the CPU: there the kernels run interpreted, for tests.

Knows extents, not operations. On a GPU nothing is looked at: reading an index back would stall the device once per layer.
"""

from __future__ import annotations

import torch

from kernels.ops import AttentionMeta


def check_range(what: str, indexes: torch.Tensor, bound: int) -> None:
    """Raises ValueError for an index outside 0..bound-1."""
    if indexes.device.type != "cpu" or not indexes.numel():
        return
    low, high = int(indexes.min()), int(indexes.max())
    if low < 0 or high >= bound:
        raise ValueError(f"{what}: {low}..{high} is outside 0..{bound - 1}")


def check_slots(slot_mapping: torch.Tensor, cache: torch.Tensor) -> None:
    """Raises ValueError for a slot outside cache [B, L, 2, Hkv, block_size, D]."""
    num_blocks, block_size = cache.shape[0], cache.shape[4]
    check_range(f"slots of {num_blocks} x {block_size}", slot_mapping, num_blocks * block_size)


def check_batch(meta: AttentionMeta, cache: torch.Tensor) -> None:
    """Raises ValueError for a batch whose rows, positions, contexts or block tables do not fit together or into the cache."""
    if meta.positions.device.type != "cpu":
        return
    num_blocks, block_size = cache.shape[0], cache.shape[4]
    starts = meta.query_starts.tolist()
    if starts[0] != 0 or starts[-1] != meta.num_tokens or starts != sorted(starts):
        raise ValueError(f"query_starts {starts} do not cover the {meta.num_tokens} tokens of the step")
    for s, context in enumerate(meta.context_lens.tolist()):
        num_needed = -(-context // block_size)
        if num_needed > meta.block_tables.shape[1]:
            raise ValueError(f"sequence {s}: a context of {context} needs {num_needed} blocks, its table has fewer")
        check_range(f"sequence {s}: block ids", meta.block_tables[s, :num_needed], num_blocks)
        check_range(f"sequence {s}: positions", meta.positions[starts[s] : starts[s + 1]], context)
    if max(meta.context_lens.tolist(), default=0) > meta.max_context_len:
        raise ValueError(f"max_context_len {meta.max_context_len} is below the longest context")
