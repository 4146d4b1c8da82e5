"""The tensors of a Llama-family model: their Hugging Face names and shapes, derived from the spec. Pure.

Used to check files before they are read and to load by name; knows nothing of file formats or torch. Shapes are
[out, in] for projections and [n] for norms and biases.
"""

from __future__ import annotations

from engine.model_spec import ModelSpec

Shape = tuple[int, ...]


def layer_tensors(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    """Names and shapes of the tensors of one decoder layer."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    prefix = f"model.layers.{layer}"
    shapes: dict[str, Shape] = {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.self_attn.q_proj.weight": (query, hidden),
        f"{prefix}.self_attn.k_proj.weight": (key, hidden),
        f"{prefix}.self_attn.v_proj.weight": (key, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, query),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
    }
    if spec.qkv_bias:
        shapes |= {f"{prefix}.self_attn.{name}_proj.bias": (size,) for name, size in (("q", query), ("k", key), ("v", key))}
    if spec.output_bias:
        shapes[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
    if spec.qk_norm:
        shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (spec.head_dim,) for name in ("q", "k")}
    if spec.mlp_bias:
        shapes |= {f"{prefix}.mlp.{name}_proj.bias": (size,) for name, size in (("gate", inner), ("up", inner), ("down", hidden))}
    return shapes


def required_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Names and shapes of all tensors; `lm_head.weight` only when the embeddings are not tied."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        shapes |= layer_tensors(spec, layer)
    return shapes
