"""The native kernels' promise behind "same answer everywhere": a row's bits depend on nothing but the row.

Each test computes the same rows alone and in other company (batch, chunking, threads, block placement) and compares bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from kernels.native import NativeOps
from kernels.ops import AttentionMeta
from tests.native_instructions import HERE, native_ops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module", params=HERE)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return native_ops(request.param)


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the thread count that the test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(131, 200), (1536, 75)])
def test_linear_rows_do_not_depend_on_the_batch(ops: NativeOps, dtype: torch.dtype, num_inputs: int, num_outputs: int) -> None:
    x = rand(100, num_inputs, dtype=dtype)
    packed = ops.pack_linear(rand(num_outputs, num_inputs, dtype=dtype, seed=1), rand(num_outputs, dtype=dtype, seed=2))
    together = ops.linear(x, packed)
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 48):
        for start in (0, 100 - size):
            assert same_bits(ops.linear(x[start : start + size], packed), together[start : start + size]), (size, start)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16, 100])
def test_linear_does_not_depend_on_threads(ops: NativeOps, dtype: torch.dtype, num_tokens: int, threads: None) -> None:
    x, packed = rand(num_tokens, 500, dtype=dtype), ops.pack_linear(rand(333, 500, dtype=dtype, seed=1), None)
    results = []
    for count in (1, 2, 3, 7, 40):
        torch.set_num_threads(count)
        results.append(ops.linear(x, packed))
    assert all(same_bits(results[0], other) for other in results[1:])


def test_row_wise_operations_do_not_depend_on_the_batch(ops: NativeOps, dtype: torch.dtype) -> None:
    x, weight = rand(70, 600, dtype=dtype), rand(600, dtype=dtype, seed=1)
    normed, activated = ops.rms_norm(x, weight, 1e-5), ops.silu_mul(x)
    for t in (0, 33, 69):
        assert same_bits(ops.rms_norm(x[t : t + 1], weight, 1e-5), normed[t : t + 1])
        assert same_bits(ops.silu_mul(x[t : t + 1]), activated[t : t + 1])


class Sequence:
    """One sequence of `length` tokens with its KV in a cache of its own placement, and its queries for every position."""

    def __init__(
        self, dtype: torch.dtype, length: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, seed: int
    ) -> None:
        self.length, self.block_size, self.head_dim = length, block_size, head_dim
        self.q = rand(length, num_heads, head_dim, dtype=dtype, seed=seed)
        self.k = rand(length, num_kv_heads, head_dim, dtype=dtype, seed=seed + 1)
        self.v = rand(length, num_kv_heads, head_dim, dtype=dtype, seed=seed + 2)


def attend(ops: NativeOps, parts: list[tuple[Sequence, int, int]], window: int | None, seed: int = 0) -> list[torch.Tensor]:
    """One ragged batch of rows [start, stop) of each sequence, blocks placed at random; the output per part."""
    first = parts[0][0]
    size = first.block_size
    widths = [-(-stop // size) for _, _, stop in parts]
    rng = random.Random(seed)
    num_blocks = sum(widths) + 2
    free = rng.sample(range(num_blocks), num_blocks)
    cache = torch.full((num_blocks, 1, 2, first.k.shape[1], size, first.head_dim), 7.0, dtype=first.k.dtype)
    tables, positions, starts = [], [], [0]
    for (sequence, start, stop), width in zip(parts, widths, strict=True):
        table = [free.pop() for _ in range(width)]
        slots = torch.tensor([table[p // size] * size + p % size for p in range(stop)], dtype=torch.int64)
        ops.kv_write(sequence.k[:stop], sequence.v[:stop], cache, 0, slots)
        tables.append(table + [0] * (max(widths) - width))
        positions += range(start, stop)
        starts.append(starts[-1] + stop - start)
    meta = AttentionMeta(
        positions=torch.tensor(positions),
        slot_mapping=torch.zeros(len(positions), dtype=torch.int64),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([stop for _, _, stop in parts], dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        max_query_len=max(stop - start for _, start, stop in parts),
        max_context_len=max(stop for _, _, stop in parts),
    )
    q = torch.cat([sequence.q[start:stop] for sequence, start, stop in parts])
    out = ops.attention(q, cache, 0, meta, first.head_dim**-0.5, window)
    return [out[a:b] for a, b in zip(starts, starts[1:], strict=False)]


@pytest.mark.parametrize("window", [None, 50, 700])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (4, 4, 20, 7), (7, 1, 32, 64)])
def test_attention_does_not_depend_on_chunking(
    ops: NativeOps, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int | None
) -> None:
    length = 1100  # three chunks of keys
    sequence = Sequence(dtype, length, num_heads, num_kv_heads, head_dim, block_size, seed=10)
    (whole,) = attend(ops, [(sequence, 0, length)], window)
    for cuts in ([0, 512, length], [0, 1, 17, 33, 500, 777, length], [0, 1099, length]):
        pieces = [attend(ops, [(sequence, a, b)], window, seed=b)[0] for a, b in zip(cuts, cuts[1:], strict=False)]
        assert same_bits(torch.cat(pieces), whole), cuts
    for position in (0, 31, 32, 511, 512, 1023, 1024, 1099):  # as decode steps
        (row,) = attend(ops, [(sequence, position, position + 1)], window, seed=position)
        assert same_bits(row, whole[position : position + 1]), position


def test_attention_does_not_depend_on_neighbours(ops: NativeOps, dtype: torch.dtype) -> None:
    def make(length: int, seed: int) -> Sequence:
        return Sequence(dtype, length, 6, 2, 64, 16, seed)

    parts = [
        (make(900, 1), 899, 900),
        (make(40, 5), 0, 40),
        (make(600, 9), 550, 600),
        (make(1, 13), 0, 1),
        (make(70, 17), 69, 70),
    ]
    alone = [attend(ops, [part], None, seed=i)[0] for i, part in enumerate(parts)]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0], [3, 0], [1, 4]):
        together = attend(ops, [parts[i] for i in order], None, seed=99)
        assert all(same_bits(out, alone[i]) for out, i in zip(together, order, strict=True)), order


def test_attention_does_not_depend_on_threads(ops: NativeOps, dtype: torch.dtype, threads: None) -> None:
    sequence = Sequence(dtype, 2100, 6, 2, 64, 16, seed=1)
    for start, stop in ((2099, 2100), (1500, 1600)):  # a decode step spreads its chunks over threads, a prefill chunk its rows
        results = []
        for count in (1, 2, 5, 16):
            torch.set_num_threads(count)
            results.append(attend(ops, [(sequence, start, stop)], None)[0])
        assert all(same_bits(results[0], other) for other in results[1:])
