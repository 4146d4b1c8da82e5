"""The largest logit of each row over a large vocabulary, as a Triton kernel: what greedy sampling and its check need.

Owns the scan of the vocabulary in parts; torch compares the few numbers that remain. Drawing stays on the host
(kernels/sampling.py): its fp64 sums run from left to right, an order that no parallel scan reproduces to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_launch import ROUND_EACH, on_device

_PART = 8192


@triton.jit
def _largest_of_parts(logits_ptr, largest_ptr, ids_ptr, vocab_size, PART: tl.constexpr):
    """Program (r, p): the largest value of part p of row r and its lowest id; NaN if the part holds one."""
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    at = tl.program_id(0).to(tl.int64) * vocab_size + token
    logits = tl.load(logits_ptr + at, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    is_nan = logits != logits
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    comparable = tl.where(is_nan, float("-inf"), logits)
    largest = tl.max(comparable, axis=0)
    # The lowest id among equals by the minimum of ids, not by the order in which a reduction happens to compare.
    lowest = tl.min(tl.where(comparable == largest, token, vocab_size), axis=0)
    part = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(largest_ptr + part, tl.where(has_nan, float("nan"), largest))
    tl.store(ids_ptr + part, lowest)


def largest_logits(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [R, V] of any float dtype -> (largest fp32 [R], its lowest token id int64 [R]); NaN where a row holds one.

    The id of a row that holds NaN, or nothing above -inf, means nothing.
    """
    if logits.dim() != 2 or not logits.is_contiguous() or not logits.shape[1]:
        raise ValueError(f"logits must be contiguous [R, V], got shape {tuple(logits.shape)} with strides {logits.stride()}")
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _PART)
    largest = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    if num_rows:
        with on_device(logits.device):
            _largest_of_parts[(num_rows, num_parts)](logits, largest, ids, vocab_size, _PART, num_warps=8, **ROUND_EACH)
    value, part = largest.max(dim=1)  # torch gives the first of equal parts, so the lowest ids
    return value, ids.gather(1, part[:, None])[:, 0].long()
