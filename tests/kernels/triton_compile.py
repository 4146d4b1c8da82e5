"""Compiles every Triton kernel for a GPU that need not be there: run as a script, prints one JSON line per kernel.

The launchers run on small CPU tensors with Triton's launch replaced by a recorder; each recorded kernel is then compiled with the
types, constants and options of its real launch. usage: python -m tests.kernels.triton_compile CAPABILITY DTYPE, for example 90 bfloat16.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from kernels import triton_rows
from kernels.ops import AttentionMeta
from kernels.triton_attention import paged_attention
from kernels.triton_blocks import BlockCopies
from kernels.triton_matmul import invariant_linear
from kernels.triton_qkv import prepare_qkv
from kernels.triton_sampling import largest_logits

Launch = tuple[JITFunction, dict[str, Any], dict[str, Any]]


def record_launches(dtype: torch.dtype) -> list[Launch]:
    """Every kernel with the arguments and options that its launcher gives it."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False))
        arguments.update({name: options.pop(name) for name in list(options) if name in self.arg_names})
        launches.append((self, arguments, options))

    original, JITFunction.run = JITFunction.run, record
    try:
        launch_everything(dtype)
    finally:
        JITFunction.run = original
    return launches


def launch_everything(dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim, block_size = 9, 3, 80, 16
    cache = torch.zeros(64, 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    x, weight = torch.zeros(2, 96, dtype=dtype), torch.zeros(96, dtype=dtype)
    heads = torch.zeros(2, num_heads, head_dim, dtype=dtype)
    kv = torch.zeros(2, num_kv_heads, head_dim, dtype=dtype)
    norm, angles = torch.zeros(head_dim, dtype=dtype), torch.zeros(2, head_dim // 2)
    slots = torch.zeros(2, dtype=torch.int64)
    triton_rows.rms_norm(x, weight, 1e-5)
    triton_rows.add_rms_norm(x, x, weight, 1e-5)
    triton_rows.head_rms_norm(heads, norm, 1e-5)
    triton_rows.silu_mul(x)
    triton_rows.rotate_(heads, angles, angles)
    triton_rows.kv_write(kv, kv, cache, 1, slots)
    qkv = torch.zeros(2, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    prepare_qkv(qkv, (norm, norm), 1e-5, angles, angles, slots, cache, 1, slots)
    for out_dtype in {dtype, torch.float32}:
        invariant_linear(x, torch.zeros(40, 96, dtype=dtype), torch.zeros(40, dtype=dtype), out_dtype)
    meta = AttentionMeta(
        positions=torch.tensor([600, 601]),
        slot_mapping=slots,
        query_starts=torch.tensor([0, 2], dtype=torch.int32),
        context_lens=torch.tensor([602], dtype=torch.int32),
        block_tables=torch.zeros(1, 38, dtype=torch.int32),
        max_query_len=2,
        max_context_len=602,
    )
    paged_attention(heads, cache, 1, meta, 0.1, None, num_processors=100)
    copies = BlockCopies(torch.device("cpu"))
    slab = memoryview(bytearray(cache[0].numel() * cache.element_size()))
    copies.gather(cache, [3], slab, slab.nbytes)
    copies.scatter(slab, cache, [3], slab.nbytes)
    largest_logits(torch.zeros(2, 9000, dtype=dtype))


def compile_launch(launch: Launch, capability: int) -> triton.compiler.CompiledKernel:
    kernel, arguments, options = launch
    signature, constants, hints = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        else:
            signature[parameter.name] = mangle_type(value)
            if isinstance(value, torch.Tensor):  # as torch allocates on a GPU
                hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main() -> None:
    capability, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
    for launch in record_launches(dtype):
        compiled = compile_launch(launch, capability)
        shared_bytes = compiled.metadata.shared
        print(json.dumps({"kernel": launch[0].__name__, "shared_bytes": shared_bytes, "cubin_bytes": len(compiled.asm["cubin"])}))


if __name__ == "__main__":
    main()
