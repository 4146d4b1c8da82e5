"""Turns GGUF metadata into the `config.json` and `generation_config.json` of the same model.

Every value comes from the file; what the file does not state and the model needs is an error, never a guess. Floats
are fp32 in GGUF and are written as the shortest decimal that names the same fp32 value.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.model_spec import ModelError
from engine.weights.gguf_file import ROPE_FACTORS_TENSOR, GGUFFile

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LLAMA3_LOW_FREQ_FACTOR, _LLAMA3_HIGH_FREQ_FACTOR, _LLAMA3_ORIGINAL_POSITIONS = 1.0, 4.0, 8192
_EOS_KEYS = ("eos_token_id", "eot_token_id")


def shortest_float(value: float) -> float:
    """The shortest decimal that is the same fp32 number: 9.999999747378752e-06 becomes 1e-05."""
    return float(str(np.float32(value)))


def model_config(file: GGUFFile, dtype: str) -> dict[str, Any]:
    """`config.json` of the file, for weights stored as `dtype`. Raises ModelError for what the family lacks."""
    if int(file.metadata.get(f"{file.architecture}.expert_count", 0)):
        raise ModelError(f"{file.path}: mixture-of-experts models are not supported")
    value = file.architecture_value
    names = set(file.tensor_names)
    num_heads = int(value("attention.head_count"))
    hidden_size = int(value("embedding_length"))
    head_dim = int(value("attention.key_length", hidden_size // num_heads))
    if int(value("attention.value_length", head_dim)) != head_dim:
        raise ModelError(f"{file.path}: key and value heads of different length are not supported")
    if int(value("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(f"{file.path}: partial rotary embeddings are not supported in GGUF files")
    config: dict[str, Any] = {
        "architectures": [_CLASSES[file.architecture]],
        "model_type": file.architecture,
        "num_hidden_layers": int(value("block_count")),
        "hidden_size": hidden_size,
        "intermediate_size": int(value("feed_forward_length")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(value("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shortest_float(value("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(value("context_length")),
        "rope_theta": shortest_float(value("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, head_dim),
        "vocab_size": len(file.metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "torch_dtype": dtype,
    }
    if file.architecture == "llama":
        config["mlp_bias"] = False
    if file.architecture == "qwen2":
        del config["attention_bias"]  # always present in this architecture
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if f"tokenizer.ggml.{key}" in file.metadata:
            config[name] = int(file.metadata[f"tokenizer.ggml.{key}"])
    config["eos_token_id"] = eos_token_ids(file)[0]
    return config


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """`generation_config.json`: which tokens end a completion. GGUF states no sampling defaults."""
    eos = eos_token_ids(file)
    config: dict[str, Any] = {"eos_token_id": eos if len(eos) > 1 else eos[0]}
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if f"tokenizer.ggml.{key}" in file.metadata:
            config[name] = int(file.metadata[f"tokenizer.ggml.{key}"])
    return config


def eos_token_ids(file: GGUFFile) -> list[int]:
    """End of sequence and, where it differs, end of turn. ModelError when the file names neither."""
    keys = (f"tokenizer.ggml.{key}" for key in _EOS_KEYS)
    ids = list(dict.fromkeys(int(file.metadata[key]) for key in keys if key in file.metadata))
    if not ids:
        raise ModelError(f"{file.path}: metadata field tokenizer.ggml.eos_token_id is missing")
    return ids


def _rope_scaling(file: GGUFFile, head_dim: int) -> dict[str, Any] | None:
    kind = str(file.metadata.get(f"{file.architecture}.rope.scaling.type", "none"))
    if kind == "none" and ROPE_FACTORS_TENSOR in file.tensor_names:
        return _llama3_scaling(file, head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: rope scaling type {kind!r} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": shortest_float(file.architecture_value("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = int(file.architecture_value("rope.scaling.original_context_length"))
    return scaling


def _llama3_scaling(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """GGUF keeps Llama 3's scaling as a divisor per frequency; the four parameters are recovered and proven equal.

    The largest divisor is the factor. The other three never varied in published models; if they do not reproduce the
    tensor the file is refused.
    """
    stored = file.read(ROPE_FACTORS_TENSOR).astype(np.float64)
    theta = float(file.architecture_value("rope.freq_base", 10000.0))
    factor = round(float(stored.max()), 4)  # the divisors were computed in fp32
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = _LLAMA3_LOW_FREQ_FACTOR, _LLAMA3_HIGH_FREQ_FACTOR
    smooth = np.clip((_LLAMA3_ORIGINAL_POSITIONS / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise ModelError(f"{file.path}: the frequency factors of {ROPE_FACTORS_TENSOR} follow no known rope scaling")
    return {
        "rope_type": "llama3",
        "factor": shortest_float(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_POSITIONS,
    }
