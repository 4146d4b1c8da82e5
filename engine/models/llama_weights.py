"""The weights of the Llama family as the device operations want them: fused projections, packed once.

Owns which Hugging Face tensors make up a layer and which of them are joined. Query, key and value are one projection and so
are gate and up: fewer calls per layer, and decode on a CPU is bound by calls and memory traffic. Knows no files and no batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.model_spec import ModelSpec
from kernels.ops import DecoderLayerWeights, Ops, PackedLinear

TensorSource = Callable[[str], torch.Tensor]
"""Gives the tensor of a Hugging Face name in the model's dtype, on its device."""


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """All weights of a model. `embedding` [V, H] is looked up by token id; `head` projects [R, H] to the vocabulary."""

    embedding: torch.Tensor
    layers: tuple[DecoderLayerWeights, ...]
    final_norm: torch.Tensor
    head: PackedLinear


def load_llama_weights(spec: ModelSpec, source: TensorSource, ops: Ops) -> LlamaWeights:
    """Takes every tensor of the model from `source` once and packs the projections for `ops`."""
    embedding = source("model.embed_tokens.weight")
    layers = tuple(_load_layer(spec, layer, source, ops) for layer in range(spec.num_layers))
    final_norm = source("model.norm.weight")
    head = embedding if spec.tied_embeddings else source("lm_head.weight")
    return LlamaWeights(embedding, layers, final_norm, ops.pack_linear(head, None))


def _load_layer(spec: ModelSpec, layer: int, source: TensorSource, ops: Ops) -> DecoderLayerWeights:
    prefix = f"model.layers.{layer}"

    def fused(*names: str, bias: bool) -> PackedLinear:
        weights = [source(f"{prefix}.{name}.weight") for name in names]
        biases = [source(f"{prefix}.{name}.bias") for name in names] if bias else []
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return ops.pack_linear(weight, torch.cat(biases) if bias else None)

    return DecoderLayerWeights(
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
