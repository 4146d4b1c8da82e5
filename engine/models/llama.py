"""The Llama family (Llama, Mistral, Qwen2, Qwen3) as one forward pass over the device operations.

Owns the order of operations and the fused weights; knows no files, no scheduler and no sampling. Query, key and value are
one projection and so are gate and up: fewer calls per layer, and decode on a CPU is bound by calls and memory traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.model_spec import ModelSpec
from engine.models.rotary import RotaryTable, build_rotary_table
from kernels.ops import AttentionMeta, Ops, PackedLinear

TensorSource = Callable[[str], torch.Tensor]
"""Gives the tensor of a Hugging Face name in the model's dtype, on its device."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer. `query_norm` and `key_norm` [D] exist with qk-norm only. `window` as in ModelSpec."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: PackedLinear
    post_attention_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None


class LlamaModel:
    """A loaded model. `num_positions` bounds the positions that may be computed; more raises IndexError."""

    def __init__(self, spec: ModelSpec, source: TensorSource, ops: Ops, num_positions: int) -> None:
        self.spec = spec
        self._ops = ops
        self._embedding = source("model.embed_tokens.weight")
        self._rotary: RotaryTable = build_rotary_table(spec, num_positions, self._embedding.device)
        self._layers = [_load_layer(spec, layer, source, ops) for layer in range(spec.num_layers)]
        self._final_norm = source("model.norm.weight")
        head = self._embedding if spec.tied_embeddings else source("lm_head.weight")
        self._head = ops.pack_linear(head, None)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def forward(
        self, token_ids: torch.Tensor, meta: AttentionMeta, cache: torch.Tensor, sample_rows: torch.Tensor
    ) -> torch.Tensor:
        """Writes the KV of all T tokens and returns the logits [R, V] of the rows `sample_rows` (int64 [R]).

        token_ids int64 [T]; cache [B, L, 2, Hkv, block_size, D]. Only the sampled rows pay for the vocabulary projection.
        """
        spec, ops = self.spec, self._ops
        num_tokens, head_dim = token_ids.shape[0], spec.head_dim
        query_size, key_size = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
        cos = self._rotary.cos.index_select(0, meta.positions)
        sin = self._rotary.sin.index_select(0, meta.positions)
        scale, eps = head_dim**-0.5, spec.rms_eps

        residual = ops.embedding(token_ids, self._embedding)
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
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
            return hidden.new_empty((0, spec.vocab_size))
        normed, _ = ops.add_rms_norm(hidden, residual, self._final_norm, eps)
        return ops.linear(normed, self._head)


def _load_layer(spec: ModelSpec, layer: int, source: TensorSource, ops: Ops) -> LayerWeights:
    prefix = f"model.layers.{layer}"

    def fused(*names: str, bias: bool) -> PackedLinear:
        weights = [source(f"{prefix}.{name}.weight") for name in names]
        biases = [source(f"{prefix}.{name}.bias") for name in names] if bias else []
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return ops.pack_linear(weight, torch.cat(biases) if bias else None)

    return LayerWeights(
        input_norm=source(f"{prefix}.input_layernorm.weight"),
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=spec.qkv_bias),
        query_norm=source(f"{prefix}.self_attn.q_norm.weight") if spec.qk_norm else None,
        key_norm=source(f"{prefix}.self_attn.k_norm.weight") if spec.qk_norm else None,
        output=fused("self_attn.o_proj", bias=spec.output_bias),
        post_attention_norm=source(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=fused("mlp.gate_proj", "mlp.up_proj", bias=spec.mlp_bias),
        down=fused("mlp.down_proj", bias=spec.mlp_bias),
        window=spec.layer_windows[layer],
    )
