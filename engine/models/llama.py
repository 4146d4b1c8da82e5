"""The Llama family (Llama, Mistral, Qwen2, Qwen3) as one forward pass over the device operations.

Owns the order of operations; knows no files, no scheduler and no sampling.
"""

from __future__ import annotations

import torch

from engine.model_spec import ModelSpec
from engine.models.llama_weights import LlamaWeights
from engine.models.rotary import RotaryTable, build_rotary_table
from kernels.ops import AttentionMeta, DecoderWeights, Ops


class LlamaModel:
    """A loaded model. `num_positions` bounds the positions that may be computed; more raises IndexError."""

    def __init__(self, spec: ModelSpec, weights: LlamaWeights, ops: Ops, num_positions: int) -> None:
        self.spec = spec
        self._ops = ops
        self._weights = weights
        self._rotary: RotaryTable = build_rotary_table(spec, num_positions, self.device)
        self._fused = ops.fuse_decoder(
            DecoderWeights(
                embedding=weights.embedding,
                layers=weights.layers,
                final_norm=weights.final_norm,
                head=weights.head,
                cos=self._rotary.cos,
                sin=self._rotary.sin,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                rms_eps=spec.rms_eps,
            )
        )

    @property
    def device(self) -> torch.device:
        return self._weights.embedding.device

    def forward(
        self, token_ids: torch.Tensor, meta: AttentionMeta, cache: torch.Tensor, sample_rows: torch.Tensor
    ) -> torch.Tensor:
        """Writes the KV of all T tokens and returns the fp32 logits [R, V] of the rows `sample_rows` (int64 [R], increasing).

        token_ids int64 [T]; cache [B, L, 2, Hkv, block_size, D]. Only the sampled rows pay for the vocabulary projection.
        """
        if self._fused is not None:
            return self._fused.forward(token_ids, meta, cache, sample_rows)
        return self.forward_by_operations(token_ids, meta, cache, sample_rows)

    def forward_by_operations(
        self, token_ids: torch.Tensor, meta: AttentionMeta, cache: torch.Tensor, sample_rows: torch.Tensor
    ) -> torch.Tensor:
        """The same, one operation after the other: what a fused decoder is compared with, and what runs where there is none."""
        spec, ops, weights = self.spec, self._ops, self._weights
        num_tokens, head_dim = token_ids.shape[0], spec.head_dim
        query_size, key_size = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
        cos = self._rotary.cos.index_select(0, meta.positions)
        sin = self._rotary.sin.index_select(0, meta.positions)
        scale, eps = head_dim**-0.5, spec.rms_eps

        residual = ops.embedding(token_ids, weights.embedding)
        hidden = ops.rms_norm(residual, weights.layers[0].input_norm, eps)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            if index:
                hidden, residual = ops.add_rms_norm(hidden, residual, layer.input_norm, eps)
            qkv = ops.linear(hidden, layer.qkv)
            q = qkv[:, :query_size].contiguous().view(num_tokens, spec.num_heads, head_dim)
            k = qkv[:, query_size : query_size + key_size].contiguous().view(num_tokens, spec.num_kv_heads, head_dim)
            v = qkv[:, query_size + key_size :].contiguous().view(num_tokens, spec.num_kv_heads, head_dim)
            if layer.query_norm is not None and layer.key_norm is not None:
                q = ops.head_rms_norm(q, layer.query_norm, eps)
                k = ops.head_rms_norm(k, layer.key_norm, eps)
            ops.rope_(q, k, cos, sin)
            ops.kv_write(k, v, cache, index, meta.slot_mapping)
            if index == last and not sample_rows.shape[0]:
                break  # a prompt chunk in the middle: all KV is written, nobody wants logits
            attended = ops.attention(q, cache, index, meta, scale, layer.window).view(num_tokens, query_size)
            if index == last:  # nothing after the last layer's KV depends on rows that are not sampled
                attended, residual = attended.index_select(0, sample_rows), residual.index_select(0, sample_rows)
            hidden, residual = ops.add_rms_norm(ops.linear(attended, layer.output), residual, layer.post_attention_norm, eps)
            hidden = ops.linear(ops.silu_mul(ops.linear(hidden, layer.gate_up)), layer.down)
        if not sample_rows.shape[0]:
            return hidden.new_empty((0, spec.vocab_size), dtype=torch.float32)
        normed, _ = ops.add_rms_norm(hidden, residual, weights.final_norm, eps)
        return ops.logits(normed, weights.head)
