"""The native decoder step: a model's whole forward pass as one C call, with the GIL released.

Owns the C description of the weights (addresses, so it keeps the tensors), the working memory of a step and the checks that
stand between Python and raw pointers. Knows no scheduler; results have the same bits as the operations called one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from typing import Any

import torch

from kernels import checks
from kernels.native_structs import (
    Decoder,
    DecoderLayer,
    Step,
    batch_struct,
    cache_struct,
    explain_bad_batch,
    kind_of,
    linear_struct,
    pointer_of,
)
from kernels.ops import AttentionMeta, DecoderLayerWeights, DecoderWeights, PackedLinear


class NativeDecoder:
    """Implements kernels.ops.FusedDecoder. `layout` is the packing that every linear layer must have."""

    def __init__(
        self, weights: DecoderWeights, layout: str, count_work: Callable[..., Any], run_step: Callable[..., Any]
    ) -> None:
        _check_weights(weights, layout)
        self._weights = weights  # the structures below hold addresses into it
        self._count_work, self._run_step = count_work, run_step
        self._layers = (DecoderLayer * len(weights.layers))(*map(_layer_struct, weights.layers))
        self._work = torch.empty(0, dtype=torch.float32)
        vocab_size, hidden_size = weights.embedding.shape
        self._decoder = Decoder(
            is_bf16=kind_of("embedding", weights.embedding),
            num_layers=len(weights.layers),
            hidden_size=hidden_size,
            num_heads=weights.num_heads,
            num_kv_heads=weights.num_kv_heads,
            head_dim=weights.head_dim,
            intermediate_size=weights.layers[0].down.num_inputs,
            vocab_size=vocab_size,
            half=weights.cos.shape[1],
            num_positions=weights.cos.shape[0],
            eps=weights.rms_eps,
            scale=weights.head_dim**-0.5,
            embedding=pointer_of(weights.embedding),
            layers=self._layers,
            final_norm=pointer_of(weights.final_norm),
            head=linear_struct(weights.head),
            cos=pointer_of(weights.cos),
            sin=pointer_of(weights.sin),
        )

    def forward(
        self, token_ids: torch.Tensor, meta: AttentionMeta, cache: torch.Tensor, sample_rows: torch.Tensor
    ) -> torch.Tensor:
        weights, num_tokens, num_samples = self._weights, meta.num_tokens, sample_rows.shape[0]
        checks.check_tensor("token_ids", token_ids, torch.int64, (num_tokens,))
        checks.check_tensor("sample_rows", sample_rows, torch.int64, (num_samples,))
        shape = (cache.shape[0], len(weights.layers), 2, weights.num_kv_heads, cache.shape[4], weights.head_dim)
        checks.check_tensor("cache", cache, weights.embedding.dtype, shape)
        step = Step(
            batch_struct(meta), pointer_of(token_ids), pointer_of(meta.slot_mapping), pointer_of(sample_rows), num_samples
        )
        num_floats = self._count_work(byref(self._decoder), num_tokens)
        if self._work.numel() < num_floats:
            self._work = torch.empty(num_floats, dtype=torch.float32)
        logits = torch.empty((num_samples, weights.head.num_outputs), dtype=torch.float32)
        bad = self._run_step(
            byref(self._decoder),
            byref(cache_struct(cache, 0)),
            byref(step),
            self._work.data_ptr(),
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        if bad >= 0:
            raise ValueError(self._explain(bad, token_ids, meta, cache, sample_rows))
        return logits

    def _explain(
        self, bad: int, token_ids: torch.Tensor, meta: AttentionMeta, cache: torch.Tensor, sample_rows: torch.Tensor
    ) -> str:
        """What the C side found: position * 4 + kind (BatonBadIndex in kernels/cpu/api.h)."""
        index, kind = divmod(bad, 4)
        vocab_size, num_positions = self._weights.embedding.shape[0], self._weights.cos.shape[0]
        if kind == 0:
            return f"token id {int(token_ids[index])} at position {index} is outside the vocabulary of {vocab_size}"
        if kind == 1:
            size = f"{cache.shape[0]} x {cache.shape[4]}"
            return f"slot {int(meta.slot_mapping[index])} at {index} is outside the cache's {size} slots"
        if kind == 2:
            return f"{explain_bad_batch(meta, cache, index)}, or of {num_positions} positions"
        return f"sample rows {sample_rows.tolist()[:8]} do not increase within the {meta.num_tokens} rows of the step"


def _layer_struct(layer: DecoderLayerWeights) -> DecoderLayer:
    return DecoderLayer(
        input_norm=pointer_of(layer.input_norm),
        qkv=linear_struct(layer.qkv),
        query_norm=None if layer.query_norm is None else pointer_of(layer.query_norm),
        key_norm=None if layer.key_norm is None else pointer_of(layer.key_norm),
        output=linear_struct(layer.output),
        post_attention_norm=pointer_of(layer.post_attention_norm),
        gate_up=linear_struct(layer.gate_up),
        down=linear_struct(layer.down),
        window=layer.window or 0,
    )


def _check_weights(weights: DecoderWeights, layout: str) -> None:
    """Every extent that the C side trusts. Raises ValueError naming the tensor."""
    dtype = weights.embedding.dtype
    vocab_size, hidden = weights.embedding.shape
    heads, kv_heads, head_dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
    if not weights.layers or heads % kv_heads:
        raise ValueError(f"{len(weights.layers)} layers, {heads} query heads over {kv_heads} KV heads")
    intermediate = weights.layers[0].down.num_inputs

    def check_linear(what: str, packed: PackedLinear, num_outputs: int, num_inputs: int) -> None:
        if packed.layout != layout or (packed.num_outputs, packed.num_inputs) != (num_outputs, num_inputs):
            raise ValueError(
                f"{what} is {packed.num_outputs} x {packed.num_inputs} packed as {packed.layout!r}, "
                f"expected {num_outputs} x {num_inputs} packed as {layout!r}"
            )
        if packed.weight.dtype != dtype or not packed.weight.is_contiguous():
            raise ValueError(f"{what} is {packed.weight.dtype}, expected contiguous {dtype}")
        if packed.bias is not None:
            checks.check_tensor(f"{what} bias", packed.bias, dtype, (num_outputs,))

    for index, layer in enumerate(weights.layers):
        checks.check_tensor(f"layer {index} input_norm", layer.input_norm, dtype, (hidden,))
        checks.check_tensor(f"layer {index} post_attention_norm", layer.post_attention_norm, dtype, (hidden,))
        if (layer.query_norm is None) != (layer.key_norm is None):
            raise ValueError(f"layer {index} has only one of query_norm and key_norm")
        if layer.query_norm is not None and layer.key_norm is not None:
            checks.check_tensor(f"layer {index} query_norm", layer.query_norm, dtype, (head_dim,))
            checks.check_tensor(f"layer {index} key_norm", layer.key_norm, dtype, (head_dim,))
        check_linear(f"layer {index} qkv", layer.qkv, (heads + 2 * kv_heads) * head_dim, hidden)
        check_linear(f"layer {index} output", layer.output, hidden, heads * head_dim)
        check_linear(f"layer {index} gate_up", layer.gate_up, 2 * intermediate, hidden)
        check_linear(f"layer {index} down", layer.down, hidden, intermediate)
    check_linear("head", weights.head, vocab_size, hidden)
    checks.check_tensor("embedding", weights.embedding, dtype, (vocab_size, hidden))
    checks.check_tensor("final_norm", weights.final_norm, dtype, (hidden,))
    checks.check_tensor("cos", weights.cos, torch.float32, weights.cos.shape)
    checks.check_tensor("sin", weights.sin, torch.float32, weights.cos.shape)
    if 2 * weights.cos.shape[1] > head_dim:
        raise ValueError(f"cos has {weights.cos.shape[1]} columns, at most half of head_dim {head_dim} can be rotated")
