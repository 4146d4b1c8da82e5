"""Writes small GGUF files for tests, as llama.cpp's converter would write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers.convert_slow_tokenizer import bytes_to_unicode

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
MERGES = ["Ġ 1", "h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3"]
VOCAB_SIZE = len(SPECIALS) + 256 + len(MERGES)

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    architecture: str,
    tensors: Mapping[str, np.ndarray[Any, Any] | tuple[np.ndarray[Any, Any], GGMLQuantizationType]],
    **changes: Any,
) -> Path:
    """`tensors` under GGUF names (with a type: raw blocks). `changes` replace metadata by key, None leaves a field out.

    Keys with a dot stand for themselves, others for `<architecture>.<key>` with `__` for dots.
    """
    metadata: dict[str, Any] = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 256,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.key_length": HEAD_DIM,
        f"{architecture}.attention.value_length": HEAD_DIM,
        f"{architecture}.rope.freq_base": 50000.0,
        f"{architecture}.rope.dimension_count": HEAD_DIM,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": SPECIALS + list(bytes_to_unicode().values()) + [merge.replace(" ", "") for merge in MERGES],
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * (256 + len(MERGES)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
    }
    for key, value in changes.items():
        metadata[key if "." in key else f"{architecture}.{key.replace('__', '.')}"] = value
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(state: Mapping[str, torch.Tensor], architecture: str) -> dict[str, np.ndarray[Any, Any]]:
    """A Hugging Face state dict in GGUF's names and row order."""
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for name, value in state.items():
        stem, _, kind = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        array = value.detach().float().numpy()
        heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(stem)
        if architecture == "llama" and heads is not None:
            # llama.cpp's converter: [heads, 2, D/2] -> [heads, D/2, 2]
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        tensors[f"{prefix}{GGUF_NAMES[stem]}.{kind}"] = np.ascontiguousarray(array)
    return tensors


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
