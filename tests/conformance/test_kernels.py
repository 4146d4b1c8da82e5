"""One suite for every implementation of the operations: each equals the plain-torch reference within a stated tolerance.

The expected values come from fp64 arithmetic or from the reference run in fp32; fp32 results may differ by rounding order
(atol + rtol 2e-5), bf16 results by one unit in the last place of bf16 (2^-8 relative) where a value lay near a rounding border.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch

from kernels.digest import payload_digest
from kernels.native import NativeOps
from kernels.ops import AttentionMeta, Ops
from kernels.reference import ReferenceOps
from tests.kernels.triton_device import skip_without_index_checks, triton_ops
from tests.native_instructions import HERE, native_ops

REFERENCE = ReferenceOps()
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=["reference", *HERE, "triton"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return ReferenceOps()
    return triton_ops() if request.param == "triton" else native_ops(request.param)


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    tolerance = 2e-5 if actual.dtype == torch.float32 else 2**-7.5
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance / 2)


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_meta(
    rng: random.Random, query_lens: list[int], past_lens: list[int], block_size: int, num_blocks: int, extra_columns: int = 1
) -> AttentionMeta:
    """A ragged batch over randomly placed blocks; the table's padding names block 0, as the runner writes it."""
    contexts = [q + p for q, p in zip(query_lens, past_lens, strict=True)]
    free = rng.sample(range(num_blocks), num_blocks)
    width = max([-(-c // block_size) for c in contexts], default=0) + extra_columns
    tables, positions, slots, starts = [], [], [], [0]
    for query_len, context in zip(query_lens, contexts, strict=True):
        blocks = [free.pop() for _ in range(-(-context // block_size))]
        tables.append(blocks + [0] * (width - len(blocks)))
        rows = range(context - query_len, context)
        positions += rows
        slots += [blocks[p // block_size] * block_size + p % block_size for p in rows]
        starts.append(starts[-1] + query_len)
    return AttentionMeta(
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32).view(len(contexts), width),
        max_query_len=max(query_lens, default=0),
        max_context_len=max(contexts, default=0),
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_inputs", "num_outputs"), [(0, 5, 7), (1, 1, 1), (1, 576, 200), (2, 65, 33), (3, 64, 100)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_of_few_rows(
    ops: Ops, dtype: torch.dtype, num_tokens: int, num_inputs: int, num_outputs: int, has_bias: bool
) -> None:
    check_linear(ops, dtype, num_tokens, num_inputs, num_outputs, has_bias)


@pytest.mark.parametrize("num_tokens", [4, 5, 6, 7, 11, 12, 13, 16, 31, 97])
def test_linear_of_many_rows(ops: Ops, dtype: torch.dtype, num_tokens: int) -> None:
    check_linear(ops, dtype, num_tokens, num_inputs=129, num_outputs=75, has_bias=True)


def test_linear_of_more_rows_than_one_block_holds(ops: Ops, dtype: torch.dtype) -> None:
    check_linear(ops, dtype, num_tokens=60, num_inputs=3001, num_outputs=40, has_bias=False)  # a block of rows is 24 here


def check_linear(ops: Ops, dtype: torch.dtype, num_tokens: int, num_inputs: int, num_outputs: int, has_bias: bool) -> None:
    x = rand(num_tokens, num_inputs, dtype=dtype, seed=1)
    weight = rand(num_outputs, num_inputs, dtype=dtype, seed=2) / num_inputs**0.5
    bias = rand(num_outputs, dtype=dtype, seed=3) if has_bias else None
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    assert_close(ops.linear(x, ops.pack_linear(weight, bias)), exact.to(dtype))


@pytest.mark.parametrize("width", [1, 7, 8, 30, 576])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_norms(ops: Ops, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    x, residual = rand(num_tokens, width, dtype=dtype, seed=1), rand(num_tokens, width, dtype=dtype, seed=2)
    weight = rand(width, dtype=dtype, seed=3)
    assert_close(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_close(normed, REFERENCE.rms_norm(x + residual, weight, 1e-5))
    heads = rand(num_tokens, 3, width, dtype=dtype, seed=4)
    assert_close(ops.head_rms_norm(heads, weight, 1e-6), REFERENCE.head_rms_norm(heads, weight, 1e-6))


def test_norm_of_zeros_is_zero(ops: Ops, dtype: torch.dtype) -> None:
    assert torch.equal(
        ops.rms_norm(torch.zeros(2, 16, dtype=dtype), torch.ones(16, dtype=dtype), 1e-5), torch.zeros(2, 16, dtype=dtype)
    )


@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (64, 32), (20, 20), (6, 2)])
@pytest.mark.parametrize("num_tokens", [0, 1, 65])
def test_rope(ops: Ops, dtype: torch.dtype, num_tokens: int, head_dim: int, rotated: int) -> None:
    q, k = rand(num_tokens, 6, head_dim, dtype=dtype, seed=1), rand(num_tokens, 2, head_dim, dtype=dtype, seed=2)
    angles = rand(num_tokens, rotated // 2, dtype=torch.float32, seed=3) * 10
    expected_q, expected_k = q.clone(), k.clone()
    REFERENCE.rope_(expected_q, expected_k, angles.cos(), angles.sin())
    untouched = q[..., rotated:].clone()
    ops.rope_(q, k, angles.cos(), angles.sin())
    assert_close(q, expected_q)
    assert_close(k, expected_k)
    assert torch.equal(q[..., rotated:], untouched)


def test_rope_by_a_quarter_turn_swaps_the_halves(ops: Ops) -> None:
    q, k = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.zeros(1, 1, 4)
    ops.rope_(q, k, torch.zeros(1, 2), torch.ones(1, 2))
    assert q.tolist() == [[[-3.0, -4.0, 1.0, 2.0]]]


@pytest.mark.parametrize("width", [1, 8, 13, 1536])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_silu_mul(ops: Ops, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    gate_up = rand(num_tokens, 2 * width, dtype=dtype) * 5
    assert_close(ops.silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


def test_silu_mul_of_extreme_gates(ops: Ops) -> None:
    gates = [-1000.0, -90.0, -88.0, -87.0, 0.0, 87.0, 1000.0, float("nan")]
    out = ops.silu_mul(torch.tensor([gates + [1.0] * len(gates)]))[0]
    assert out[:4].abs().max() < 1e-30
    assert out[4:7].tolist() == [0.0, 87.0, 1000.0]
    assert out[7].isnan()


def test_embedding(ops: Ops, dtype: torch.dtype) -> None:
    table = rand(11, 5, dtype=dtype)
    ids = torch.tensor([3, 0, 10, 3])
    assert torch.equal(ops.embedding(ids, table), table[ids])
    assert ops.embedding(ids[:0], table).shape == (0, 5)


@pytest.mark.parametrize("head_dim", [4, 16, 64, 72])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_kv_write_stores_each_row_in_its_slot_and_nothing_else(
    ops: Ops, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    cache = rand(9, 2, 2, 3, block_size, head_dim, dtype=dtype)
    k, v = rand(7, 3, head_dim, dtype=dtype, seed=1), rand(7, 3, head_dim, dtype=dtype, seed=2)
    slots = torch.tensor(random.Random(0).sample(range(9 * block_size), 7))
    expected = cache.clone()
    for t, slot in enumerate(slots.tolist()):
        expected[slot // block_size, 1, 0, :, slot % block_size] = k[t]
        expected[slot // block_size, 1, 1, :, slot % block_size] = v[t]
    ops.kv_write(k, v, cache, 1, slots)
    assert torch.equal(cache, expected)
    ops.kv_write(k[:0], v[:0], cache, 0, slots[:0])
    assert torch.equal(cache, expected)


ATTENTION_BATCHES = {
    "empty": ([], []),
    "one_token": ([1], [0]),
    "decode": ([1, 1, 1, 1], [0, 6, 31, 64]),
    "prefill": ([50], [0]),
    "chunk": ([33], [30]),
    "mixed": ([1, 17, 1, 40], [70, 3, 16, 0]),
    "idle_sequence": ([2, 0, 3], [5, 4, 0]),
    "long": ([1, 20], [1100, 1050]),
}


@pytest.mark.parametrize("batch", ATTENTION_BATCHES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (4, 4, 16, 8), (7, 1, 128, 5), (4, 2, 20, 32)]
)
@pytest.mark.parametrize("window", [None, 1, 24])
def test_attention(
    ops: Ops,
    dtype: torch.dtype,
    batch: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
) -> None:
    is_half, is_long = dtype is torch.bfloat16, batch == "long"
    if "interpreter" in ops.describe() and (window == 1 or (window and is_half) or (is_long and (num_heads != 9 or not is_half))):
        pytest.skip("the interpreter takes seconds for this; tests/kernels/test_triton.py has smaller cases")
    q, cache, meta, expected = attention_case(dtype, batch, num_heads, num_kv_heads, head_dim, block_size, window)
    assert_close(ops.attention(q, cache, 1, meta, head_dim**-0.5, window), expected)


@functools.cache
def attention_case(
    dtype: torch.dtype, batch: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor, AttentionMeta, torch.Tensor]:
    """Inputs and the expected output of one case; computed once for all implementations (the slow part of this suite)."""
    query_lens, past_lens = ATTENTION_BATCHES[batch]
    num_blocks = sum(-(-(q + p) // block_size) for q, p in zip(query_lens, past_lens, strict=True)) + 3
    meta = make_meta(random.Random(7), query_lens, past_lens, block_size, num_blocks)
    cache = rand(num_blocks, 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    q = rand(meta.num_tokens, num_heads, head_dim, dtype=dtype, seed=1)
    return q, cache, meta, plain_attention(q, cache, 1, meta, head_dim**-0.5, window)


def plain_attention(
    q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMeta, scale: float, window: int | None
) -> torch.Tensor:
    """Row by row and head by head in fp64, straight from the definition; shares nothing with any implementation."""
    out = torch.empty_like(q)
    group, block_size = q.shape[1] // cache.shape[3], cache.shape[4]
    starts = meta.query_starts.tolist()
    for s in range(meta.num_sequences):
        context = int(meta.context_lens[s])
        places = [(int(meta.block_tables[s, j // block_size]), j % block_size) for j in range(context)]
        keys = torch.stack([cache[b, layer, 0, :, o] for b, o in places]).double()
        values = torch.stack([cache[b, layer, 1, :, o] for b, o in places]).double()
        for t in range(starts[s], starts[s + 1]):
            last = int(meta.positions[t]) + 1
            first = 0 if window is None else max(0, last - window)
            for h in range(q.shape[1]):
                scores = keys[first:last, h // group] @ q[t, h].double() * scale
                out[t, h] = (scores.softmax(0) @ values[first:last, h // group]).to(q.dtype)
    return out


def test_attention_with_scores_far_apart_does_not_overflow(ops: Ops, dtype: torch.dtype) -> None:
    meta = make_meta(random.Random(3), [40], [0], block_size=16, num_blocks=5)
    cache = rand(5, 1, 2, 1, 16, 64, dtype=dtype) * 30
    q = rand(40, 2, 64, dtype=dtype, seed=1) * 30
    out = ops.attention(q, cache, 0, meta, 1.0, None)
    assert out.isfinite().all()
    assert_close(out, plain_attention(q, cache, 0, meta, 1.0, None))


def test_attention_reads_nothing_beyond_the_context(ops: Ops, dtype: torch.dtype) -> None:
    meta = make_meta(random.Random(3), [1, 3], [20, 5], block_size=16, num_blocks=6)
    cache = torch.full((6, 1, 2, 2, 16, 32), float("nan"), dtype=dtype)
    for s, context in enumerate(meta.context_lens.tolist()):
        for j in range(context):
            cache[meta.block_tables[s, j // 16], 0, :, :, j % 16] = rand(2, 2, 32, dtype=dtype, seed=j)
    assert ops.attention(rand(4, 4, 32, dtype=dtype), cache, 0, meta, 0.2, None).isfinite().all()


def test_a_nan_in_a_visible_key_is_not_hidden(ops: Ops, dtype: torch.dtype) -> None:
    meta = make_meta(random.Random(3), [1], [20], block_size=16, num_blocks=3)
    cache = rand(3, 1, 2, 1, 16, 32, dtype=dtype)
    cache[meta.block_tables[0, 0], 0, 0, 0, 4, 7] = float("nan")
    assert ops.attention(rand(1, 1, 32, dtype=dtype), cache, 0, meta, 0.2, None).isnan().all()


@pytest.mark.parametrize(
    "shape",
    [(6, 2, 2, 3, 16, 64), (6, 1, 2, 1, 4, 8), (5, 1, 2, 1, 3, 5), (4, 3, 2, 1, 1, 7)],
    ids=["even", "rows", "odd", "tiny"],
)
@pytest.mark.parametrize("block_ids", [[], [2], [3, 0, 1], [1, 2, 3, 0]])
def test_gather_and_scatter_move_the_bytes_and_agree_on_the_digest(
    ops: Ops, dtype: torch.dtype, shape: tuple[int, ...], block_ids: list[int]
) -> None:
    cache = rand(*shape, dtype=dtype)
    blocks = cache[block_ids] if block_ids else cache[:0]
    expected = bytes(blocks.contiguous().view(-1).view(torch.uint8).tolist())
    slab = bytearray(b"\xee" * (len(expected) + 32))
    digest = ops.gather_blocks(cache, block_ids, memoryview(slab))
    assert slab == expected + b"\xee" * 32
    assert digest == payload_digest(expected)

    target, targets = torch.zeros_like(cache), [shape[0] - 1 - i for i in range(len(block_ids))]
    assert ops.scatter_blocks(memoryview(bytes(slab)), target, targets) == digest
    untouched = [b for b in range(shape[0]) if b not in targets]
    assert torch.equal(target[targets] if targets else target[:0], blocks)
    assert not target[untouched].any()


def test_any_flipped_byte_changes_the_digest(ops: Ops) -> None:
    cache = rand(3, 1, 2, 1, 2, 9, dtype=torch.float32)  # 144 bytes a block: whole rows and a tail
    slab = bytearray(2 * 144)
    digest = ops.gather_blocks(cache, [2, 0], memoryview(slab))
    for index in range(0, len(slab), 23 if "interpreter" in ops.describe() else 1):
        slab[index] ^= 1 << index % 8
        assert ops.scatter_blocks(memoryview(slab), cache, [0, 1]) != digest, index
        slab[index] ^= 1 << index % 8
    assert ops.scatter_blocks(memoryview(slab), cache, [0, 1]) == digest


def test_swapped_blocks_change_the_digest(ops: Ops) -> None:
    cache = rand(4, 1, 2, 1, 16, 64, dtype=torch.bfloat16)
    slab = memoryview(bytearray(3 * cache[0].numel() * 2))
    assert ops.gather_blocks(cache, [0, 1, 2], slab) != ops.gather_blocks(cache, [0, 2, 1], slab)


# --- what every implementation refuses, before it touches memory ---


def refuses(message: str) -> pytest.RaisesExc[ValueError]:
    return pytest.raises(ValueError, match=message)


def test_wrong_extents_are_refused_with_the_quantities(ops: Ops) -> None:
    x, weight = rand(3, 8, dtype=torch.float32), rand(4, 9, dtype=torch.float32)
    with refuses(r"x must be contiguous torch.float32 of shape \(3, 9\).*\(3, 8\)"):
        ops.linear(x, ops.pack_linear(weight, None))
    with refuses(r"bias must .*\(4,\)"):
        ops.pack_linear(weight, rand(5, dtype=torch.float32))
    with refuses("weight must"):
        ops.rms_norm(x, rand(9, dtype=torch.float32), 1e-5)
    with refuses("residual must"):
        ops.add_rms_norm(x, x[:2], x[0], 1e-5)
    with refuses("two equal halves"):
        ops.silu_mul(weight)
    with refuses("rotates 10 dims, heads have 8"):
        ops.rope_(x[:, None], x[:, None], torch.zeros(3, 5), torch.zeros(3, 5))


def test_strided_tensors_are_refused(ops: Ops) -> None:
    x = rand(8, 8, dtype=torch.float32).T
    with refuses("contiguous"):
        ops.rms_norm(x, x[0].contiguous(), 1e-5)
    with refuses("contiguous"):
        ops.linear(x, ops.pack_linear(torch.ones(2, 8), None))
    with refuses("contiguous"):
        ops.silu_mul(x)


def test_mixed_dtypes_are_refused(ops: Ops) -> None:
    with refuses("bfloat16"):
        ops.linear(torch.ones(1, 8), ops.pack_linear(torch.ones(2, 8, dtype=torch.bfloat16), None))
    with refuses("float32"):
        ops.rms_norm(torch.ones(1, 8), torch.ones(8, dtype=torch.bfloat16), 1e-5)


def test_weights_of_another_implementation_are_refused(ops: Ops) -> None:
    packed = ops.pack_linear(torch.ones(2, 8), None)
    other: Ops = ReferenceOps() if ops.name == "native" else NativeOps(torch.float32)
    with refuses("packed as"):
        other.linear(torch.ones(1, 8), packed)


@pytest.mark.parametrize("slot", [-1, 48, 2**40])
def test_a_slot_outside_the_cache_is_refused_and_nothing_is_written(ops: Ops, slot: int) -> None:
    skip_without_index_checks(ops)
    cache = torch.zeros(3, 1, 2, 1, 16, 8)
    with refuses("slot.*3 x 16"):
        ops.kv_write(torch.ones(2, 1, 8), torch.ones(2, 1, 8), cache, 0, torch.tensor([0, slot]))
    assert not cache.any()


def test_a_layer_outside_the_cache_is_refused(ops: Ops) -> None:
    cache = torch.zeros(3, 2, 2, 1, 16, 8)
    with refuses("layer 2 is outside the cache's 2 layers"):
        ops.kv_write(torch.ones(1, 1, 8), torch.ones(1, 1, 8), cache, 2, torch.tensor([0]))


def test_block_ids_and_slabs_that_do_not_fit_are_refused(ops: Ops) -> None:
    cache = torch.zeros(3, 1, 2, 1, 16, 8)
    slab = memoryview(bytearray(2048))
    for bad in ([3], [-1], [0, 2**40]):
        with refuses("outside the cache's 3 blocks"):
            ops.gather_blocks(cache, bad, slab)
    with refuses("slab of 2048 bytes .* cannot hold 3 x 1024 bytes"):
        ops.gather_blocks(cache, [0, 1, 2], slab)
    with refuses("read-only"):
        ops.gather_blocks(cache, [0], memoryview(bytes(2048)))
    with refuses("2 blocks names only 1 distinct"):
        ops.scatter_blocks(slab, cache, [1, 1])
    with refuses("cannot hold"):
        ops.scatter_blocks(memoryview(bytearray(4096))[::2], cache, [0])


@pytest.mark.parametrize("token_id", [-1, 5])
def test_a_token_id_outside_the_vocabulary_is_refused(ops: Ops, token_id: int) -> None:
    skip_without_index_checks(ops)
    with refuses(f"token id.*{token_id}"):
        ops.embedding(torch.tensor([0, token_id]), torch.ones(5, 8))


def bad_meta(**changes: list[int] | list[list[int]]) -> AttentionMeta:
    """Two sequences of 1 and 2 rows over blocks of 16, with some fields replaced."""
    fields: dict[str, list[int] | list[list[int]]] = {
        "positions": [3, 17, 18],
        "query_starts": [0, 1, 3],
        "context_lens": [4, 19],
        "block_tables": [[1, 0], [2, 3]],
    }
    fields.update(changes)
    tensors = {k: torch.tensor(v, dtype=torch.int64 if k == "positions" else torch.int32) for k, v in fields.items()}
    return AttentionMeta(slot_mapping=torch.zeros(3, dtype=torch.int64), max_query_len=2, max_context_len=19, **tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tables": [[1, 0], [2, 4]]}, "sequence 1.*4"),
        ({"block_tables": [[-1, 0], [2, 3]]}, "sequence 0.*-1"),
        ({"block_tables": [[1], [2]]}, "sequence 1"),
        ({"positions": [3, 17, 19]}, "sequence 1.*19"),
        ({"positions": [-1, 17, 18]}, "sequence 0.*-1"),
        ({"query_starts": [0, 1, 2]}, "query_starts.*cover the 3 tokens"),
        ({"query_starts": [1, 1, 3]}, "query_starts.*cover the 3 tokens"),
    ],
)
def test_a_batch_that_points_outside_the_cache_is_refused(
    ops: Ops, changes: dict[str, list[int] | list[list[int]]], message: str
) -> None:
    skip_without_index_checks(ops)
    q, cache = torch.ones(3, 2, 8), torch.zeros(4, 1, 2, 1, 16, 8)
    ops.attention(q, cache, 0, bad_meta(), 1.0, None)
    with refuses(message):
        ops.attention(q, cache, 0, bad_meta(**changes), 1.0, None)


def test_index_tensors_of_a_wrong_dtype_or_shape_are_refused() -> None:
    with refuses("context_lens must be contiguous torch.int32"):
        AttentionMeta(
            positions=torch.zeros(1, dtype=torch.int64),
            slot_mapping=torch.zeros(1, dtype=torch.int64),
            query_starts=torch.zeros(2, dtype=torch.int32),
            context_lens=torch.zeros(1, dtype=torch.int64),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            max_query_len=1,
            max_context_len=1,
        )


def test_query_heads_must_divide_over_kv_heads(ops: Ops) -> None:
    meta = make_meta(random.Random(0), [1], [3], block_size=16, num_blocks=2)
    with refuses("4 query heads do not divide over 3 KV heads"):
        ops.attention(torch.ones(1, 4, 8), torch.zeros(2, 1, 2, 3, 16, 8), 0, meta, 1.0, None)
