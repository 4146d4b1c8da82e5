"""Reading GGUF: each block type against a decoder written from the format's description, names, row order, metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.model_spec import ModelError
from engine.weights.gguf_config import model_config, shortest_float
from engine.weights.gguf_file import GGUFFile, hugging_face_name, restore_rope_rows
from tests.unit.engine.tiny_gguf import HEAD_DIM, write_gguf

Type = GGMLQuantizationType


def half(block: bytes, offset: int) -> float:
    return float(np.frombuffer(block, np.float16, 1, offset)[0])


def decode_q4_0(block: bytes) -> list[float]:
    scale, packed = half(block, 0), block[2:18]
    return [scale * ((byte & 15) - 8) for byte in packed] + [scale * ((byte >> 4) - 8) for byte in packed]


def decode_q4_1(block: bytes) -> list[float]:
    scale, offset, packed = half(block, 0), half(block, 2), block[4:20]
    return [scale * (byte & 15) + offset for byte in packed] + [scale * (byte >> 4) + offset for byte in packed]


def decode_q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * int(value) for value in np.frombuffer(block, np.int8, 32, 2)]


def decode_q4_k(block: bytes) -> list[float]:
    scale, offset, packed_scales, packed = half(block, 0), half(block, 2), block[4:16], block[16:144]

    def pair(index: int) -> tuple[int, int]:
        if index < 4:
            return packed_scales[index] & 63, packed_scales[index + 4] & 63
        low = packed_scales[index + 4]
        return (low & 15) | (packed_scales[index - 4] >> 6) << 4, (low >> 4) | (packed_scales[index] >> 6) << 4

    values: list[float] = []
    for group in range(8):
        factor, minimum = pair(group)
        chunk = packed[group // 2 * 32 : group // 2 * 32 + 32]
        values += [scale * factor * ((byte >> 4) if group % 2 else (byte & 15)) - offset * minimum for byte in chunk]
    return values


def decode_q6_k(block: bytes) -> list[float]:
    scales, scale = np.frombuffer(block, np.int8, 16, 192), half(block, 208)
    values = [0.0] * 256
    for part in range(2):
        low, high = block[part * 64 : part * 64 + 64], block[128 + part * 32 : 128 + part * 32 + 32]
        for index in range(32):
            for quarter in range(4):
                nibble = low[index + 32 * (quarter % 2)] >> (4 * (quarter // 2)) & 15
                quant = (nibble | (high[index] >> 2 * quarter & 3) << 4) - 32
                values[part * 128 + quarter * 32 + index] = scale * int(scales[part * 8 + index // 16 + 2 * quarter]) * quant
    return values


DECODERS: dict[GGMLQuantizationType, Callable[[bytes], list[float]]] = {
    Type.Q4_0: decode_q4_0,
    Type.Q4_1: decode_q4_1,
    Type.Q8_0: decode_q8_0,
    Type.Q4_K: decode_q4_k,
    Type.Q6_K: decode_q6_k,
}
HALF_OFFSETS = {Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q8_0: [0], Type.Q4_K: [0, 2], Type.Q6_K: [208]}


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Any bit pattern is a valid block except for the fp16 scales, which are set to small numbers."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(int(kind))
    blocks = random.integers(0, 256, (rows, columns // block_size, block_bytes), dtype=np.uint8)
    for offset in HALF_OFFSETS[kind]:
        scales = random.normal(scale=0.05, size=blocks.shape[:2]).astype(np.float16)
        blocks[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_quantised_blocks_decode_as_the_format_says(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    blocks = random_blocks(kind, 5, 512)
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", {"token_embd.weight": (blocks, kind)}))
    values = file.read("token_embd.weight")
    block_bytes = GGML_QUANT_SIZES[kind][1]
    flat = blocks.tobytes()
    expected = [
        value for start in range(0, len(flat), block_bytes) for value in DECODERS[kind](flat[start : start + block_bytes])
    ]
    assert values.shape == (5, 512)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values.ravel(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q8_0], ids=lambda kind: kind.name)
def test_values_survive_writing_and_reading_within_the_types_precision(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    values = np.random.default_rng(2).normal(size=(7, 64)).astype(np.float32)
    stored = quantize(values, kind)
    tensor = (stored, kind) if kind not in (Type.F32, Type.F16) else stored
    read = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", {"token_embd.weight": tensor})).read("token_embd.weight")
    if kind == Type.F32:
        assert np.array_equal(read, values)
    elif kind == Type.F16:
        assert np.array_equal(read, values.astype(np.float16).astype(np.float32))
    elif kind == Type.BF16:
        assert np.array_equal(read, torch.from_numpy(values).bfloat16().float().numpy())
    else:
        step = np.abs(values).max() / (127 if kind == Type.Q8_0 else 7)
        assert 0 < np.abs(read - values).max() < step


def test_q_and_k_rows_return_to_half_rotation_order_in_llama_files_only(tmp_path: Path) -> None:
    rows = np.arange(4 * HEAD_DIM, dtype=np.float32)[:, None].repeat(32, axis=1)
    for architecture in ("llama", "qwen2", "qwen3"):
        path = write_gguf(
            tmp_path / f"{architecture}.gguf", architecture, {"blk.0.attn_q.weight": rows, "blk.0.attn_v.weight": rows}
        )
        read = {name: values[:, 0] for name, _, values in GGUFFile(path).hugging_face_tensors()}
        query = read["model.layers.0.self_attn.q_proj.weight"].astype(int).tolist()
        assert read["model.layers.0.self_attn.v_proj.weight"].astype(int).tolist() == list(range(64))
        evens, odds = list(range(0, HEAD_DIM, 2)), list(range(1, HEAD_DIM, 2))
        assert query[:HEAD_DIM] == (evens + odds if architecture == "llama" else list(range(HEAD_DIM)))


def test_restoring_rows_is_the_inverse_of_llama_cpps_order() -> None:
    original = np.random.default_rng(0).normal(size=(6 * 8, 5)).astype(np.float32)
    stored = original.reshape(6, 2, 4, 5).swapaxes(1, 2).reshape(48, 5)
    assert np.array_equal(restore_rope_rows(stored, 6), original)
    assert np.array_equal(restore_rope_rows(stored[:, 0], 6), original[:, 0])


def test_floats_are_written_as_their_shortest_decimal() -> None:
    assert shortest_float(9.999999747378752e-06) == 1e-05
    assert shortest_float(float(np.float32(1000000.0))) == 1000000.0


EMBEDDING = {"token_embd.weight": np.zeros((4, 64), dtype=np.float32)}


def test_configuration_comes_from_the_metadata(tmp_path: Path) -> None:
    config = model_config(GGUFFile(write_gguf(tmp_path / "m.gguf", "qwen3", EMBEDDING)), "bfloat16")
    assert config["model_type"] == "qwen3"
    assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"]) == (1e-5, 50000.0, HEAD_DIM)
    assert config["tie_word_embeddings"] is True
    assert config["rope_scaling"] is None
    untied = write_gguf(tmp_path / "u.gguf", "qwen3", EMBEDDING | {"output.weight": np.zeros((4, 64), dtype=np.float32)})
    assert model_config(GGUFFile(untied), "bfloat16")["tie_word_embeddings"] is False


def test_linear_and_yarn_scaling_are_read_and_others_refused(tmp_path: Path) -> None:
    def scaling(**changes: Any) -> Any:
        return model_config(GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", EMBEDDING, **changes)), "float32")["rope_scaling"]

    assert scaling(rope__scaling__type="linear", rope__scaling__factor=4.0) == {"rope_type": "linear", "factor": 4.0}
    yarn = scaling(rope__scaling__type="yarn", rope__scaling__factor=2.5, rope__scaling__original_context_length=64)
    assert yarn == {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 64}
    with pytest.raises(ModelError, match="longrope"):
        scaling(rope__scaling__type="longrope")
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.factor is missing"):
        scaling(rope__scaling__type="linear")


def test_llama3_scaling_is_recovered_from_the_frequency_divisors(tmp_path: Path) -> None:
    parameters = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    reference = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        head_dim=128,
        rope_theta=500000.0,
        max_position_embeddings=131072,
        rope_scaling=dict(parameters),
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (np.arange(0, 128, 2) / 128)
    divisors = (plain / scaled.numpy()).astype(np.float32)
    sizes: dict[str, Any] = {
        "attention__key_length": 128,
        "attention__value_length": 128,
        "rope__dimension_count": 128,
        "rope__freq_base": 500000.0,
    }

    path = write_gguf(tmp_path / "m.gguf", "llama", EMBEDDING | {"rope_freqs.weight": divisors}, **sizes)
    assert model_config(GGUFFile(path), "float32")["rope_scaling"] == parameters
    assert [name for name, _, _ in GGUFFile(path).hugging_face_tensors()] == ["model.embed_tokens.weight"]
    changed = write_gguf(
        tmp_path / "c.gguf",
        "llama",
        EMBEDDING | {"rope_freqs.weight": divisors * np.linspace(1, 1.1, 64, dtype=np.float32)},
        **sizes,
    )
    with pytest.raises(ModelError, match="no known rope scaling"):
        model_config(GGUFFile(changed), "float32")


def test_unusable_files_are_one_clear_error(tmp_path: Path) -> None:
    good = write_gguf(tmp_path / "good.gguf", "llama", {"token_embd.weight": np.ones((300, 64), dtype=np.float32)})
    data = good.read_bytes()
    for length in (0, 3, 40, len(data) // 8, len(data) - 5000):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf: (not a complete GGUF file|truncated)"):
            GGUFFile(cut)
    with pytest.raises(ModelError, match="no such file"):
        GGUFFile(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="architecture 'gemma3' is not supported"):
        GGUFFile(write_gguf(tmp_path / "g.gguf", "gemma3", EMBEDDING))
    with pytest.raises(ModelError, match="type IQ4_NL; supported are"):
        GGUFFile(
            write_gguf(tmp_path / "q.gguf", "llama", {"token_embd.weight": (np.zeros((2, 18), dtype=np.uint8), Type.IQ4_NL)})
        )
    with pytest.raises(ModelError, match="mixture-of-experts"):
        model_config(GGUFFile(write_gguf(tmp_path / "e.gguf", "llama", EMBEDDING, expert_count=8)), "float32")
    with pytest.raises(ModelError, match=r"llama\.context_length is missing"):
        model_config(GGUFFile(write_gguf(tmp_path / "c.gguf", "llama", EMBEDDING, context_length=None)), "float32")
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_gate_exps\.weight is not part"):
        hugging_face_name("blk.0.ffn_gate_exps.weight", good)
