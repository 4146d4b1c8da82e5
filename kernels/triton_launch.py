"""What all Triton kernels share: whether they run compiled or interpreted, how they are launched, and the tile sizes of rows.

Knows Triton and the environment, no operation. Every kernel is launched without fusing a multiplication and an addition into
one rounding: two kernels that share a function then round alike, whatever the compiler makes of the code around it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter on the CPU: TRITON_INTERPRET=1 when triton was first imported."""

IS_INTERPRETED = tl.constexpr(INTERPRETED)
"""The same for use inside kernels. The interpreter cuts bf16 off instead of rounding, and cannot multiply bf16 matrices."""

ROUND_EACH: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options of every kernel."""

ASSERT_INDEXES: dict[str, Any] = {"debug": True, "sanitize_overflow": False, **ROUND_EACH}
"""Launch options of kernels that write where an index says: a bad one stops the device with an error, as in torch."""


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 x in `dtype`, rounded to nearest, ties to even."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + ((bits >> 16) & 1) + 0x7FFF, 0x7FC00000)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


class TritonUnavailable(Exception):
    """The Triton kernels cannot run here; the message says why."""


def require_usable(device: torch.device) -> None:
    """Raises TritonUnavailable unless kernels can be launched on tensors of `device`."""
    if device.type == "cuda":
        if INTERPRETED:
            raise TritonUnavailable("TRITON_INTERPRET is set: kernels would run in the interpreter on the CPU")
        if not torch.cuda.is_available():
            raise TritonUnavailable("torch finds no CUDA device")
    elif device.type != "cpu" or not INTERPRETED:
        raise TritonUnavailable(
            f"Triton kernels run on cuda, or on cpu with TRITON_INTERPRET=1 set before triton is imported; not on {device.type!r}"
        )


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes `device` current: Triton launches on the current device, whatever device its arguments lie on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def padded(extent: int) -> int:
    """The power of two that a tile needs to hold `extent` values."""
    return 1 << max(extent - 1, 0).bit_length()


def dot_width(extent: int) -> int:
    """As `padded`, but at least the 16 that a matrix product needs."""
    return max(16, padded(extent))


def warps_for(num_values: int) -> int:
    """Warps for a program that holds `num_values` in registers. A function of the model's extents only, never of the batch."""
    return min(16, max(1, padded(num_values) // 512))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy that starts at a multiple of 16 bytes.

    Triton compiles another kernel for pointers that are not so aligned, which might reduce in another order.
    """
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
