"""Matrix product of activations and weights with a fixed order of additions, as a Triton kernel.

Owns the batch-invariant linear: tiles and their order over K depend on the dtype only, never on the number of rows, so a row's
bits are the same in any batch. A vendor's library is faster in general and gives no such promise. Arguments were checked before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_launch import IS_INTERPRETED, ROUND_EACH, aligned, on_device, rounded

# Rows, outputs and inputs of a tile: 64 rows fill the matrix unit once, so few rows cost no more time than reading the weights.
_HALF_TILE = {"ROWS": 64, "OUTPUTS": 64, "INPUTS": 64, "num_warps": 4, "num_stages": 4}
_WIDE_TILE = {"ROWS": 32, "OUTPUTS": 32, "INPUTS": 32, "num_warps": 4, "num_stages": 3}


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    x_at = x_ptr + row.to(tl.int64)[:, None] * num_inputs + column[None, :]
    weight_at = weight_ptr + output.to(tl.int64)[None, :] * num_inputs + column[:, None]
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, num_inputs, INPUTS):
        inside = first + column < num_inputs
        x = tl.load(x_at + first, mask=(row < num_rows)[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_at + first, mask=(output < num_outputs)[None, :] & inside[:, None], other=0.0)
        if IS_INTERPRETED:  # the interpreter keeps bf16 as integers and cannot multiply them
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=output < num_outputs, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(at, rounded(total, out_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & (output < num_outputs)[None, :])


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """x [T, K] @ weight [N, K].T + bias [N] -> [T, N], accumulated in fp32 and rounded once to `out_dtype`."""
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=out_dtype, device=x.device)
    if out.numel():
        tile = _WIDE_TILE if x.dtype == torch.float32 else _HALF_TILE
        grid = (triton.cdiv(num_outputs, tile["OUTPUTS"]), triton.cdiv(num_rows, tile["ROWS"]))
        shape = (num_rows, num_outputs, num_inputs, bias is not None)
        with on_device(x.device):
            _linear[grid](
                aligned(x),
                aligned(weight),
                weight if bias is None else bias,
                out,
                *shape,
                **tile,
                **ROUND_EACH,
            )
    return out
