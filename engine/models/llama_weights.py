"""The weights of the Llama family as the device operations want them: fused projections, packed once.

Owns which Hugging Face tensors make up a layer and which of them are joined. Query, key and value are one projection and so
are gate and up: fewer calls per layer, and decode on a CPU is bound by calls and memory traffic. Knows no files and no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from engine.model_spec import ModelSpec
from kernels.ops import DecoderLayerWeights, Ops, PackedLinear

TensorSource = Callable[[str], torch.Tensor]
"""Gives the tensor of a Hugging Face name in the model's dtype, on its device."""

HEAD = "head"
EMBEDDING_TENSOR = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """All weights of a model. `embedding` [V, H] is looked up by token id; `head` projects [R, H] to the vocabulary."""

    embedding: torch.Tensor
    layers: tuple[DecoderLayerWeights, ...]
    final_norm: torch.Tensor
    head: PackedLinear


@dataclass(frozen=True, slots=True)
class LinearParts:
    """Hugging Face names of the tensors that are joined, rows one after the other, into one linear layer."""

    weights: tuple[str, ...]
    biases: tuple[str, ...]


def linear_parts(spec: ModelSpec) -> dict[str, LinearParts]:
    """Every linear layer of the model under the name that `load_llama_weights` looks it up by, in a fixed order."""
    linears: dict[str, LinearParts] = {}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"

        def parts(*names: str, bias: bool, prefix: str = prefix) -> LinearParts:
            weights = tuple(f"{prefix}.{name}.weight" for name in names)
            return LinearParts(weights, tuple(f"{prefix}.{name}.bias" for name in names) if bias else ())

        linears |= {
            f"{layer}.qkv": parts("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=spec.qkv_bias),
            f"{layer}.output": parts("self_attn.o_proj", bias=spec.output_bias),
            f"{layer}.gate_up": parts("mlp.gate_proj", "mlp.up_proj", bias=spec.mlp_bias),
            f"{layer}.down": parts("mlp.down_proj", bias=spec.mlp_bias),
        }
    linears[HEAD] = LinearParts((EMBEDDING_TENSOR if spec.tied_embeddings else "lm_head.weight",), ())
    return linears


def pack_linears(spec: ModelSpec, source: TensorSource, ops: Ops) -> Iterator[tuple[str, PackedLinear]]:
    """Takes the tensors of every linear layer from `source` and packs them for `ops`, one layer at a time."""
    for name, parts in linear_parts(spec).items():
        weights, biases = [source(part) for part in parts.weights], [source(part) for part in parts.biases]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        yield name, ops.pack_linear(weight, torch.cat(biases) if biases else None)


def load_llama_weights(spec: ModelSpec, source: TensorSource, linears: Mapping[str, PackedLinear]) -> LlamaWeights:
    """Joins the packed linear layers with the tensors that stay as they are: embedding and norms, taken from `source`."""
    layers = tuple(_layer(spec, layer, source, linears) for layer in range(spec.num_layers))
    return LlamaWeights(source(EMBEDDING_TENSOR), layers, source("model.norm.weight"), linears[HEAD])


def _layer(spec: ModelSpec, layer: int, source: TensorSource, linears: Mapping[str, PackedLinear]) -> DecoderLayerWeights:
    prefix = f"model.layers.{layer}"
    return DecoderLayerWeights(
        input_norm=source(f"{prefix}.input_layernorm.weight"),
        qkv=linears[f"{layer}.qkv"],
        query_norm=source(f"{prefix}.self_attn.q_norm.weight") if spec.qk_norm else None,
        key_norm=source(f"{prefix}.self_attn.k_norm.weight") if spec.qk_norm else None,
        output=linears[f"{layer}.output"],
        post_attention_norm=source(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=linears[f"{layer}.gate_up"],
        down=linears[f"{layer}.down"],
        window=spec.layer_windows[layer],
    )
