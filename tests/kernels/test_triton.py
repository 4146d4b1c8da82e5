"""The Triton kernels beyond the suite that all implementations share: half precision, head shapes, invariance, fusion, selection.

Interpreted on the CPU (about a millisecond per program, so grids are small), compiled where a GPU is. Bits are compared as bits.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bench import gpu_kernels
from kernels.dispatch import select_ops
from kernels.ops import Draw, Ops
from kernels.reference import ReferenceOps
from tests.conformance.test_kernels import assert_close, make_meta, plain_attention, rand
from tests.kernels.test_invariance import Sequence, attend, same_bits
from tests.kernels.test_native_decoder import (
    SHAPES,
    assert_same_bits,
    make_step,
    make_weights,
    run_by_operations,
    run_fused,
)
from tests.kernels.triton_device import triton_ops


@pytest.fixture(scope="module")
def ops() -> Ops:
    return triton_ops()


@pytest.fixture(autouse=True)
def products_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies with the host's BLAS, whose bits for a row depend on the row's place in the tile.

    A GPU's matrix unit has no such order to choose from; here products are summed over K in sequence, element by element.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        products = a.data[:, :, None] * b.data[None, :, :]
        return interpreter.TensorHandle(np.add.reduce(products, axis=1) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize(
    ("dtype", "num_heads", "num_kv_heads", "head_dim", "block_size", "window"),
    [
        (torch.bfloat16, 8, 1, 128, 16, None),
        (torch.float16, 3, 3, 64, 32, 40),
        (torch.bfloat16, 6, 2, 80, 32, None),
        (torch.float16, 9, 3, 80, 16, 5),
    ],
)
def test_attention_of_a_mixed_batch_equals_fp64(
    ops: Ops, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int | None
) -> None:
    meta = make_meta(random.Random(5), [1, 30, 0, 1, 5], [213, 12, 4, 0, 64], block_size, num_blocks=30)
    cache = rand(30, 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    q = rand(meta.num_tokens, num_heads, head_dim, dtype=dtype, seed=1)
    out = ops.attention(q, cache, 1, meta, head_dim**-0.5, window)
    assert_close(out, plain_attention(q, cache, 1, meta, head_dim**-0.5, window))


def test_half_precision_products_and_norms_equal_fp64(ops: Ops) -> None:
    x, weight = rand(5, 100, dtype=torch.float16, seed=1), rand(70, 100, dtype=torch.float16, seed=2) / 10
    exact = x.double() @ weight.double().T
    assert_close(ops.linear(x, ops.pack_linear(weight, None)), exact.half())
    logits = ops.logits(x, ops.pack_linear(weight, None))
    torch.testing.assert_close(logits, exact.float(), rtol=2e-5, atol=2e-5)
    wide, scale = x.double(), rand(100, dtype=torch.float16, seed=3)
    normed = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * scale.double()
    assert_close(ops.rms_norm(x, scale, 1e-5), normed.half())


# --- a row's bits depend on nothing but the row ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_of_products_and_norms_do_not_depend_on_the_batch(ops: Ops, dtype: torch.dtype) -> None:
    x, weight = rand(67, 150, dtype=dtype), rand(150, dtype=dtype, seed=1)
    packed = ops.pack_linear(rand(40, 150, dtype=dtype, seed=2), rand(40, dtype=dtype, seed=3))
    products, logits, normed, gated = ops.linear(x, packed), ops.logits(x, packed), ops.rms_norm(x, weight, 1e-5), ops.silu_mul(x)
    for first, count in ((0, 1), (66, 1), (16, 16), (3, 50), (33, 2)):
        part = slice(first, first + count)
        assert same_bits(ops.linear(x[part], packed), products[part]), part
        assert same_bits(ops.logits(x[part], packed), logits[part]), part
        assert same_bits(ops.rms_norm(x[part], weight, 1e-5), normed[part]), part
        assert same_bits(ops.silu_mul(x[part]), gated[part]), part


class _AttentionOnly:
    """The attention of one implementation over KV written by the reference: the write has its own tests and many programs."""

    def __init__(self, ops: Ops) -> None:
        self.attention = ops.attention
        self.kv_write = ReferenceOps().kv_write


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 100), (torch.bfloat16, None)], ids=["fp32", "bf16"])
def test_attention_does_not_depend_on_chunking(ops: Any, dtype: torch.dtype, window: int | None) -> None:
    first, length = 500, 530  # rows on both sides of the border between two chunks of keys
    sequence, attention = Sequence(dtype, length, 2, 1, 20, 16, seed=10), _AttentionOnly(ops)
    (whole,) = attend(attention, [(sequence, first, length)], window)
    for cuts in ([first, 512, length], [first, 501, length]):
        pieces = [attend(attention, [(sequence, a, b)], window, seed=b)[0] for a, b in zip(cuts, cuts[1:], strict=False)]
        assert same_bits(torch.cat(pieces), whole), cuts
    for position in (511, 512, 529):  # as decode steps
        (row,) = attend(attention, [(sequence, position, position + 1)], window, seed=position)
        assert same_bits(row, whole[position - first : position - first + 1]), position


def test_attention_does_not_depend_on_neighbours(ops: Any) -> None:
    attention = _AttentionOnly(ops)
    parts = [
        (Sequence(torch.bfloat16, length, 3, 1, 64, 16, seed), start, length)
        for length, start, seed in ((515, 514, 1), (40, 0, 5), (70, 50, 9), (1, 0, 13))
    ]
    alone = [attend(attention, [part], None, seed=i)[0] for i, part in enumerate(parts)]
    for order in ([0, 1, 2, 3], [3, 2, 0]):
        together = attend(attention, [parts[i] for i in order], None, seed=99)
        assert all(same_bits(out, alone[i]) for out, i in zip(together, order, strict=True)), order


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 600), (torch.bfloat16, None)], ids=["fp32", "bf16"])
def test_chunks_computed_apart_give_the_bits_of_chunks_in_turn(ops: Ops, dtype: torch.dtype, window: int | None) -> None:
    from kernels.triton_attention import paged_attention

    device = torch.device("cpu") if ops.describe().count("interpreter") else torch.device("cuda")
    meta = make_meta(random.Random(1), [1, 3], [1030, 10], 16, num_blocks=70)
    q, cache = rand(4, 2, 64, dtype=dtype, seed=1), rand(70, 1, 2, 1, 16, 64, dtype=dtype)
    fields = {name: getattr(meta, name) for name in meta.__slots__}
    there = type(meta)(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in fields.items()})
    apart, in_turn = (
        paged_attention(q.to(device), cache.to(device), 0, there, 0.125, window, num_processors) for num_processors in (10_000, 1)
    )
    assert same_bits(apart.cpu(), in_turn.cpu())
    assert_close(apart.cpu(), plain_attention(q, cache, 0, meta, 0.125, window))


def test_a_row_that_is_all_nan_is_not_hidden(ops: Ops) -> None:
    meta = make_meta(random.Random(3), [2], [5], block_size=16, num_blocks=3)
    q = rand(2, 1, 16, dtype=torch.float32)
    q[1] = float("nan")
    out = ops.attention(q, rand(3, 1, 2, 1, 16, 16, dtype=torch.float32), 0, meta, 0.25, None)
    assert out[0].isfinite().all() and out[1].isnan().all()


# --- the fused decoder ---


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in SHAPES), ("qwen3", torch.float32)], ids=lambda value: str(value)
)
def test_a_fused_step_has_the_bits_of_the_operations(ops: Any, name: str, dtype: torch.dtype) -> None:
    shape = replace(SHAPES[name], num_layers=min(SHAPES[name].num_layers, len(SHAPES[name].windows), 2))
    weights = make_weights(shape, ops, dtype)
    step = make_step(shape, dtype, [(4, 5), (0, 7), (30, 32)], [0, 2])
    logits, cache = run_fused(ops.fuse_decoder(weights), step)
    expected_logits, expected_cache = run_by_operations(weights, ops, step)
    assert_same_bits(logits, expected_logits)
    assert_same_bits(cache, expected_cache)


def test_a_fused_step_that_samples_nothing_writes_all_kv(ops: Any) -> None:
    shape = SHAPES["llama"]
    weights = make_weights(shape, ops, torch.float32)
    step = make_step(shape, torch.float32, [(0, 5)], [])
    logits, cache = run_fused(ops.fuse_decoder(weights), step)
    assert logits.shape == (0, shape.vocab) and logits.dtype is torch.float32
    assert_same_bits(cache, run_by_operations(weights, ops, step)[1])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU stops for good at a bad index")
def test_a_fused_step_refuses_indexes_outside_their_tensors(ops: Any) -> None:
    shape = SHAPES["llama"]
    decoder = ops.fuse_decoder(make_weights(shape, ops, torch.float32))
    step = make_step(shape, torch.float32, [(0, 3)], [0])
    for change, message in (
        ({"token_ids": torch.tensor([0, 1, shape.vocab])}, "token ids"),
        ({"sample_rows": torch.tensor([3])}, "sample rows"),
        ({"sample_rows": torch.tensor([1, 1])}, "must increase"),
        ({"cache": step.cache[:, :1].contiguous()}, "layer 2 is outside"),
    ):
        arguments = {"token_ids": step.token_ids, "cache": step.cache, "sample_rows": step.sample_rows} | change
        with pytest.raises(ValueError, match=message):
            decoder.forward(arguments["token_ids"], step.meta, arguments["cache"], arguments["sample_rows"])


# --- sampling over a large vocabulary ---


def test_the_lowest_id_wins_among_equals_across_parts_of_the_vocabulary(ops: Ops) -> None:
    logits = rand(3, 20_000, dtype=torch.float32)
    logits[0, [19_999, 8_192, 8_191]] = 50.0
    logits[1, [12_345]] = 50.0
    logits[2] = -7.0
    assert ops.sample(logits, [Draw(temperature=0.0)] * 3) == [8_191, 12_345, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_without_a_finite_maximum_is_named(ops: Ops, bad: float) -> None:
    logits = torch.zeros(3, 9000)
    logits[1, 8500] = bad
    with pytest.raises(FloatingPointError, match=r"rows \[1\]"):
        ops.sample(logits, [Draw(temperature=0.0)] * 3)


# --- selection, and the real compiler ---


def test_triton_is_chosen_for_cuda_and_says_why_when_it_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        assert select_ops(torch.device("cuda"), torch.bfloat16).name == "triton"
        return
    with caplog.at_level(logging.WARNING):
        ops = select_ops(torch.device("cuda"), torch.bfloat16, "auto")
    assert ops.name == "reference" and "triton kernels unavailable" in ops.describe()
    assert len(caplog.records) == 1
    with pytest.raises(RuntimeError, match="BATON_KERNELS=triton, but"):
        select_ops(torch.device("cuda"), torch.bfloat16, "triton")


def test_triton_on_the_cpu_is_for_the_interpreter_only() -> None:
    pytest.importorskip("triton")
    script = "import torch\nfrom kernels.dispatch import select_ops\nselect_ops(torch.device('cpu'), torch.float32, 'triton')"
    result = run_python("-c", script, TRITON_INTERPRET="0")
    assert result.returncode == 1
    assert "BATON_KERNELS=triton, but: Triton kernels run on cuda, or on cpu with TRITON_INTERPRET=1" in result.stderr


def test_batch_invariance_is_a_setting_that_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs the interpreter")
    cpu = torch.device("cpu")
    monkeypatch.setenv("BATON_BATCH_INVARIANT", "1")
    assert "batch-invariant matrix products" in select_ops(cpu, torch.float32, "triton").describe()
    monkeypatch.setenv("BATON_BATCH_INVARIANT", "0")
    assert "not batch-invariant" in select_ops(cpu, torch.float32, "triton").describe()
    monkeypatch.setenv("BATON_BATCH_INVARIANT", "yes")
    with pytest.raises(ValueError, match="must be 0 or 1, got 'yes'"):
        select_ops(cpu, torch.float32, "triton")


@pytest.mark.timeout(300)
def test_every_kernel_compiles_for_a_gpu(tmp_path: Any) -> None:
    """With the real compiler and assembler, which need no GPU: the interpreter accepts much that they do not."""
    pytest.importorskip("triton")
    result = run_python("-m", "tests.kernels.triton_compile", "90", "bfloat16", TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr[-2000:]
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    assert {"_attend", "_merge_splits", "_prepare_qkv", "_kv_write", "_linear", "_copy_blocks", "_largest_of_parts"} <= {
        line["kernel"] for line in compiled
    }
    assert max(line["shared_bytes"] for line in compiled) <= 96 << 10, "more shared memory than smaller GPUs have"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_benchmark_says_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_kernels.main([]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("no GPU: ") and not out


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": ".", **environment},
    )
