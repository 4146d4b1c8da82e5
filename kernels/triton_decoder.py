"""A decoder's forward pass for the Triton kernels: the same operations, with all between projection and attention fused.

Owns the order of operations; knows no model files and no scheduler. Against the operations one by one
(engine/models/llama.py): see triton_qkv for their bits, three launches and three copies of q, k and v fewer per layer.
"""

from __future__ import annotations

import torch

from kernels import checks, triton_guard
from kernels.ops import AttentionMeta, DecoderLayerWeights, DecoderWeights, Ops
from kernels.triton_qkv import prepare_qkv


class TritonDecoder:
    """Implements FusedDecoder over the operations of `ops`, whose device holds the weights."""

    def __init__(self, ops: Ops, decoder: DecoderWeights) -> None:
        self._ops = ops
        self._decoder = decoder

    def forward(
        self, token_ids: torch.Tensor, meta: AttentionMeta, cache: torch.Tensor, sample_rows: torch.Tensor
    ) -> torch.Tensor:
        """Writes the KV of all T tokens; fp32 logits [R, V] of `sample_rows` (int64 [R], increasing)."""
        ops, decoder = self._ops, self._decoder
        self._check(token_ids, meta, cache, sample_rows)
        num_tokens, eps = meta.num_tokens, decoder.rms_eps
        scale = decoder.head_dim**-0.5
        residual = ops.embedding(token_ids, decoder.embedding)
        hidden = ops.rms_norm(residual, decoder.layers[0].input_norm, eps)
        last = len(decoder.layers) - 1
        for index, layer in enumerate(decoder.layers):
            if index:
                hidden, residual = ops.add_rms_norm(hidden, residual, layer.input_norm, eps)
            qkv = ops.linear(hidden, layer.qkv)
            q = prepare_qkv(qkv, _norms(layer), eps, decoder.cos, decoder.sin, meta.positions, cache, index, meta.slot_mapping)
            if index == last and not sample_rows.shape[0]:
                break  # a prompt chunk in the middle: all KV is written, nobody wants logits
            attended = ops.attention(q, cache, index, meta, scale, layer.window).view(num_tokens, -1)
            if index == last:  # nothing after the last layer's KV depends on rows that are not sampled
                attended, residual = attended.index_select(0, sample_rows), residual.index_select(0, sample_rows)
            hidden, residual = ops.add_rms_norm(ops.linear(attended, layer.output), residual, layer.post_attention_norm, eps)
            hidden = ops.linear(ops.silu_mul(ops.linear(hidden, layer.gate_up)), layer.down)
        if not sample_rows.shape[0]:
            return hidden.new_empty((0, decoder.embedding.shape[0]), dtype=torch.float32)
        normed, _ = ops.add_rms_norm(hidden, residual, decoder.final_norm, eps)
        return ops.logits(normed, decoder.head)

    def _check(self, token_ids: torch.Tensor, meta: AttentionMeta, cache: torch.Tensor, sample_rows: torch.Tensor) -> None:
        decoder = self._decoder
        checks.check_cache(cache, len(decoder.layers) - 1)
        num_blocks, num_layers, _, _, block_size, _ = cache.shape
        expected = (num_blocks, len(decoder.layers), 2, decoder.num_kv_heads, block_size, decoder.head_dim)
        checks.check_tensor("cache", cache, decoder.embedding.dtype, expected)
        checks.check_tensor("token_ids", token_ids, torch.int64, (meta.num_tokens,))
        checks.check_tensor("sample_rows", sample_rows, torch.int64, (sample_rows.numel(),))
        triton_guard.check_range("positions", meta.positions, decoder.cos.shape[0])
        triton_guard.check_slots(meta.slot_mapping, cache)
        triton_guard.check_range("sample rows", sample_rows, meta.num_tokens)
        if sample_rows.device.type == "cpu" and not bool((sample_rows.diff() > 0).all()):
            raise ValueError(f"sample rows must increase, got {sample_rows.tolist()}")


def _norms(layer: DecoderLayerWeights) -> tuple[torch.Tensor, torch.Tensor] | None:
    if layer.query_norm is None or layer.key_norm is None:
        return None
    return layer.query_norm, layer.key_norm
