"""The C structures of kernels/cpu/api.h and how tensors become pointers in them.

Owns the check that a tensor lies on the CPU in a dtype the native kernels know before its address is taken. Whoever fills a
structure keeps the tensors alive as long as the structure is used.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int64, c_void_p

import torch

from kernels.ops import AttentionMeta, PackedLinear

IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


class Cache(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("num_blocks", c_int64),
        ("num_layers", c_int64),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
        ("layer", c_int64),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("num_tokens", c_int64),
        ("num_sequences", c_int64),
        ("blocks_max", c_int64),
    )


class Linear(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("num_outputs", c_int64), ("num_inputs", c_int64))


class DecoderLayer(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("qkv", Linear),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("output", Linear),
        ("post_attention_norm", c_void_p),
        ("gate_up", Linear),
        ("down", Linear),
        ("window", c_int64),
    )


class Decoder(ctypes.Structure):
    _fields_ = (
        ("is_bf16", c_int64),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("intermediate_size", c_int64),
        ("vocab_size", c_int64),
        ("half", c_int64),
        ("num_positions", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("embedding", c_void_p),
        ("layers", POINTER(DecoderLayer)),
        ("final_norm", c_void_p),
        ("head", Linear),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("batch", Batch),
        ("token_ids", c_void_p),
        ("slots", c_void_p),
        ("sample_rows", c_void_p),
        ("num_samples", c_int64),
    )


class DrawStruct(ctypes.Structure):
    _fields_ = (("temperature", c_double), ("top_p", c_double), ("min_p", c_double), ("noise", c_double), ("top_k", c_int64))


def kind_of(what: str, tensor: torch.Tensor) -> int:
    """0 for fp32, 1 for bf16; refuses every other dtype and device."""
    kind = IS_BF16.get(tensor.dtype)
    if kind is None or not tensor.is_cpu:
        raise ValueError(f"{what} must be float32 or bfloat16 on the cpu, got {tensor.dtype} on {tensor.device}")
    return kind


def pointer_of(tensor: torch.Tensor) -> int:
    if not tensor.is_cpu:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} lies on {tensor.device}, native kernels need the cpu")
    return tensor.data_ptr()


def linear_struct(packed: PackedLinear) -> Linear:
    bias = None if packed.bias is None else pointer_of(packed.bias)
    return Linear(pointer_of(packed.weight), bias, packed.num_outputs, packed.num_inputs)


def cache_struct(cache: torch.Tensor, layer: int) -> Cache:
    num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = cache.shape
    return Cache(pointer_of(cache), num_blocks, num_layers, num_kv_heads, block_size, head_dim, layer)


def batch_struct(meta: AttentionMeta) -> Batch:
    return Batch(
        pointer_of(meta.positions),
        pointer_of(meta.query_starts),
        pointer_of(meta.context_lens),
        pointer_of(meta.block_tables),
        meta.positions.shape[0],
        meta.context_lens.shape[0],
        meta.block_tables.shape[1],
    )


def explain_bad_batch(meta: AttentionMeta, cache: torch.Tensor, sequence: int) -> str:
    starts = meta.query_starts.tolist()
    if not meta.num_sequences or starts[0] != 0 or starts[-1] != meta.num_tokens:
        return f"query_starts {starts[:1]}..{starts[-1:]} do not cover the {meta.num_tokens} tokens of the step"
    rows = slice(starts[sequence], starts[sequence + 1])
    table, size = meta.block_tables[sequence].tolist(), f"{cache.shape[0]} blocks of {cache.shape[4]}"
    return (
        f"sequence {sequence}: rows {rows.start}..{rows.stop}, positions {meta.positions[rows].tolist()[:4]}, context "
        f"{int(meta.context_lens[sequence])}, block table {table[:8]} of {len(table)} do not fit a cache of {size}"
    )
