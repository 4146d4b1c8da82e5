"""Reads a GGUF file: metadata as plain values, tensors dequantised to fp32 under their Hugging Face names.

Knows the GGUF spelling of the Llama family and nothing of Baton's own modules; the file is memory-mapped and one tensor
is expanded at a time. Quantised blocks are decoded by the `gguf` package; the row order of Q and K is undone here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from engine.model_spec import ModelError

QUANTIZATIONS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Tensor types that the `gguf` package decodes exactly as llama.cpp does."""

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""`general.architecture` values of the family. Mistral files say `llama`."""

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS_TENSOR = "rope_freqs.weight"

FloatArray = np.ndarray[Any, np.dtype[np.float32]]


class GGUFFile:
    """One open GGUF file. Raises ModelError for a file that is missing, truncated or of a type outside the lists above."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
            raise ModelError(f"{path}: not a complete GGUF file ({error})") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        size = path.stat().st_size
        for tensor in reader.tensors:
            end = int(tensor.data_offset) + int(tensor.n_bytes)
            if end > size:
                raise ModelError(f"{path}: truncated, tensor {tensor.name} ends at byte {end} of {size}")
            if tensor.tensor_type.name not in QUANTIZATIONS:
                supported = ", ".join(QUANTIZATIONS)
                raise ModelError(f"{path}: tensor {tensor.name} has type {tensor.tensor_type.name}; supported are {supported}")
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{path}: architecture {self.architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
            )

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def architecture_value(self, key: str, default: Any = None) -> Any:
        """Value of `<architecture>.<key>`; raises ModelError when it is absent and there is no default."""
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if value is None:
            raise ModelError(f"{self.path}: metadata field {name} is missing")
        return value

    def read(self, name: str) -> FloatArray:
        """The tensor `name` as fp32 [out, in] (or [n]), rows in the order of the file."""
        tensor = self._tensors[name]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        data = tensor.data
        if tensor.tensor_type == GGMLQuantizationType.F32:
            return np.array(data, dtype=np.float32).reshape(shape)  # a copy: the mapping is read-only
        if tensor.tensor_type == GGMLQuantizationType.F16:
            return np.asarray(data).astype(np.float32).reshape(shape)
        return np.asarray(dequantize(data, tensor.tensor_type), dtype=np.float32).reshape(shape)

    def hugging_face_tensors(self) -> Iterator[tuple[str, int, FloatArray]]:
        """Yields (Hugging Face name, bytes of the tensor in this file, fp32 values), one tensor expanded at a time."""
        num_heads = int(self.architecture_value("attention.head_count"))
        num_kv_heads = int(self.architecture_value("attention.head_count_kv", num_heads))
        for name, tensor in self._tensors.items():
            if name == ROPE_FACTORS_TENSOR:
                continue  # stated in the configuration as rope scaling
            values = self.read(name)
            if self.architecture == "llama" and ".attn_q." in name:
                values = restore_rope_rows(values, num_heads)
            elif self.architecture == "llama" and ".attn_k." in name:
                values = restore_rope_rows(values, num_kv_heads)
            yield hugging_face_name(name, self.path), int(tensor.n_bytes), values


def hugging_face_name(name: str, path: Path) -> str:
    """The Hugging Face name of a GGUF tensor; ModelError for one that the family does not have."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_PATTERN.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ModelError(f"{path}: tensor {name} is not part of a supported architecture")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def restore_rope_rows(values: FloatArray, num_heads: int) -> FloatArray:
    """Undoes llama.cpp's row order of Q and K (interleaved rotary pairs) back to the half-rotation order.

    The file holds, per head, row 2i = original row i and row 2i+1 = original row i + D/2. Works for weights [Hq*D, H]
    and biases [Hq*D].
    """
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
