"""The fused decoder step against the operations one by one, which are its specification: the same bits in every case.

Tiny random models of each shape that the family knows (head norms, biases, windows, partial rotation, odd sizes), steps that
mix prompt chunks with decodes, any number of threads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from kernels.native import NativeOps
from kernels.native_decoder import NativeDecoder
from kernels.ops import AttentionMeta, DecoderLayerWeights, DecoderWeights, PackedLinear
from tests.native_instructions import HERE, native_ops

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    hidden: int = 48
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 40
    vocab: int = 101
    num_layers: int = 3
    half: int = 8
    has_head_norms: bool = False
    has_bias: bool = False
    windows: tuple[int | None, ...] = (None,)


SHAPES = {
    "llama": Shape(),
    "qwen3": Shape(has_head_norms=True, head_dim=24, half=12),
    "qwen2": Shape(has_bias=True, hidden=52, intermediate=37, vocab=75),
    "mistral": Shape(windows=(20, None, 20), num_heads=4, num_kv_heads=4),
    "partial": Shape(half=3, head_dim=20, num_heads=5, num_kv_heads=1, num_layers=1),
}


@pytest.fixture(scope="module", params=HERE)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return native_ops(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_weights(shape: Shape, ops: NativeOps, dtype: torch.dtype, seed: int = 0) -> DecoderWeights:
    generator = torch.Generator().manual_seed(seed)

    def rand(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * scale).to(dtype)

    def linear(num_outputs: int, num_inputs: int) -> PackedLinear:
        bias = rand(num_outputs) if shape.has_bias else None
        return ops.pack_linear(rand(num_outputs, num_inputs, scale=num_inputs**-0.5), bias)

    def layer(index: int) -> DecoderLayerWeights:
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return DecoderLayerWeights(
            input_norm=rand(shape.hidden),
            qkv=linear(queries + 2 * keys, shape.hidden),
            query_norm=rand(shape.head_dim) if shape.has_head_norms else None,
            key_norm=rand(shape.head_dim) if shape.has_head_norms else None,
            output=linear(shape.hidden, queries),
            post_attention_norm=rand(shape.hidden),
            gate_up=linear(2 * shape.intermediate, shape.hidden),
            down=linear(shape.hidden, shape.intermediate),
            window=shape.windows[index % len(shape.windows)],
        )

    angles = torch.rand(600, shape.half, generator=generator) * 6
    return DecoderWeights(
        embedding=rand(shape.vocab, shape.hidden),
        layers=tuple(map(layer, range(shape.num_layers))),
        final_norm=rand(shape.hidden),
        head=ops.pack_linear(rand(shape.vocab, shape.hidden), None),
        cos=torch.cos(angles),
        sin=torch.sin(angles),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_eps=1e-5,
    )


@dataclass
class Step:
    """One ragged step over its own blocks: `parts` are (first position, end position) of each sequence."""

    token_ids: torch.Tensor
    meta: AttentionMeta
    cache: torch.Tensor
    sample_rows: torch.Tensor


def make_step(shape: Shape, dtype: torch.dtype, parts: list[tuple[int, int]], sampled: list[int], seed: int = 1) -> Step:
    rng = random.Random(seed)
    widths = [-(-stop // BLOCK_SIZE) for _, stop in parts]
    free = rng.sample(range(sum(widths) + 1), sum(widths) + 1)
    tables = [[free.pop() for _ in range(width)] for width in widths]
    positions, slots, starts = [], [], [0]
    for (start, stop), table in zip(parts, tables, strict=True):
        positions += range(start, stop)
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, stop)]
        starts.append(len(positions))
    meta = AttentionMeta(
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([stop for _, stop in parts], dtype=torch.int32),
        block_tables=torch.tensor([table + [0] * (max(widths) - len(table)) for table in tables], dtype=torch.int32),
        max_query_len=max(stop - start for start, stop in parts),
        max_context_len=max(stop for _, stop in parts),
    )
    size = (sum(widths) + 1, shape.num_layers, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    cache = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    token_ids = torch.tensor([rng.randrange(shape.vocab) for _ in positions])
    return Step(token_ids, meta, cache, torch.tensor([starts[s + 1] - 1 for s in sampled], dtype=torch.int64))


def run_fused(decoder: NativeDecoder, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    cache = step.cache.clone()
    return decoder.forward(step.token_ids, step.meta, cache, step.sample_rows), cache


def run_by_operations(weights: DecoderWeights, ops: NativeOps, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward pass of the Llama family, one operation after the other."""
    cache, meta, tokens = step.cache.clone(), step.meta, step.token_ids.shape[0]
    heads, kv_heads, head_dim, eps = weights.num_heads, weights.num_kv_heads, weights.head_dim, weights.rms_eps
    cos, sin = weights.cos[meta.positions], weights.sin[meta.positions]
    residual = ops.embedding(step.token_ids, weights.embedding)
    hidden = ops.rms_norm(residual, weights.layers[0].input_norm, eps)
    for index, layer in enumerate(weights.layers):
        if index:
            hidden, residual = ops.add_rms_norm(hidden, residual, layer.input_norm, eps)
        q, k, v = ops.linear(hidden, layer.qkv).split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
        q, k, v = (part.contiguous().view(tokens, -1, head_dim) for part in (q, k, v))
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = ops.head_rms_norm(q, layer.query_norm, eps), ops.head_rms_norm(k, layer.key_norm, eps)
        ops.rope_(q, k, cos, sin)
        ops.kv_write(k, v, cache, index, meta.slot_mapping)
        attended = ops.attention(q, cache, index, meta, head_dim**-0.5, layer.window).view(tokens, -1)
        hidden, residual = ops.add_rms_norm(ops.linear(attended, layer.output), residual, layer.post_attention_norm, eps)
        hidden = ops.linear(ops.silu_mul(ops.linear(hidden, layer.gate_up)), layer.down)
    normed, _ = ops.add_rms_norm(hidden[step.sample_rows], residual[step.sample_rows], weights.final_norm, eps)
    return ops.logits(normed, weights.head), cache


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("parts", "sampled"),
    [
        ([(0, 1)], [0]),
        ([(36, 37)], [0]),
        ([(0, 50)], [0]),
        ([(4, 5), (0, 33), (70, 71), (20, 29), (530, 531)], [0, 2, 3, 4]),
        ([(i, i + 1) for i in range(3, 20)], list(range(17))),
    ],
    ids=["first-token", "decode", "prompt", "mixed", "decodes"],
)
def test_a_fused_step_has_the_bits_of_the_operations(
    ops: NativeOps, dtype: torch.dtype, name: str, parts: list[tuple[int, int]], sampled: list[int], threads: None
) -> None:
    weights = make_weights(SHAPES[name], ops, dtype)
    decoder, step = ops.fuse_decoder(weights), make_step(SHAPES[name], dtype, parts, sampled)
    expected_logits, expected_cache = run_by_operations(weights, ops, step)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        logits, cache = run_fused(decoder, step)
        assert_same_bits(logits, expected_logits)
        assert_same_bits(cache, expected_cache)


def test_a_step_that_samples_nothing_writes_all_kv(ops: NativeOps, dtype: torch.dtype) -> None:
    shape = SHAPES["llama"]
    weights = make_weights(shape, ops, dtype)
    step = make_step(shape, dtype, [(0, 30)], [])
    logits, cache = run_fused(ops.fuse_decoder(weights), step)
    assert logits.shape == (0, shape.vocab) and logits.dtype is torch.float32
    assert_same_bits(cache, run_by_operations(weights, ops, step)[1])


def test_a_longer_step_after_a_short_one_gets_its_own_memory(ops: NativeOps, dtype: torch.dtype) -> None:
    shape = SHAPES["llama"]
    weights = make_weights(shape, ops, dtype)
    decoder = ops.fuse_decoder(weights)
    for length in (1, 90, 2):
        step = make_step(shape, dtype, [(0, length)], [0])
        assert_same_bits(run_fused(decoder, step)[0], run_by_operations(weights, ops, step)[0])


def bad_steps() -> dict[str, tuple[str, object]]:
    return {
        "token": ("token id 101 at position 2 is outside the vocabulary of 101", ("token_ids", 2, 101)),
        "slot": ("slot 999999 at 1", ("slot_mapping", 1, 999999)),
        "position": ("sequence 0", ("positions", 4, 600)),
        "table": ("sequence 0", ("block_tables", (0, 0), -1)),
        "sample row": ("sample rows", ("sample_rows", 0, 5)),
    }


@pytest.mark.parametrize("case", bad_steps())
def test_an_index_outside_its_tensor_is_refused_before_anything_is_written(ops: NativeOps, case: str) -> None:
    message, (field, where, value) = bad_steps()[case]
    step = make_step(SHAPES["llama"], torch.float32, [(0, 5)], [0])
    getattr(step, field, None if not hasattr(step.meta, field) else getattr(step.meta, field))[where] = value
    before = step.cache.clone()
    with pytest.raises(ValueError, match=message):
        ops.fuse_decoder(make_weights(SHAPES["llama"], ops, torch.float32)).forward(
            step.token_ids, step.meta, step.cache, step.sample_rows
        )
    assert_same_bits(step.cache, before)


def test_weights_of_wrong_extents_are_refused(ops: NativeOps) -> None:
    weights = make_weights(SHAPES["llama"], ops, torch.float32)
    with pytest.raises(ValueError, match="layer 0 qkv is 160 x 48"):
        ops.fuse_decoder(
            DecoderWeights(
                weights.embedding,
                weights.layers,
                weights.final_norm,
                weights.head,
                weights.cos,
                weights.sin,
                num_heads=4,
                num_kv_heads=2,
                head_dim=16,
                rms_eps=1e-5,
            )
        )
