"""One suite for every sampling kernel: the same token as the specification in kernels/sampling.py, whatever the draw."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kernels.ops import Draw, Ops
from kernels.reference import ReferenceOps
from kernels.sampling import filtered_distribution, sample_row
from tests.native_instructions import HERE, native_ops


@pytest.fixture(scope="module", params=["reference", *HERE])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ReferenceOps() if request.param == "reference" else native_ops(request.param)


def random_draw(rng: random.Random) -> Draw:
    return Draw(
        temperature=rng.choice([0.0, 1e-6, 0.3, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 2, 40, 5000, 10**6]),
        top_p=rng.choice([1.0, 1.0, 0.0, 0.3, 0.9, 0.9999]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.5, 1.0]),
        noise=rng.choice([0.0, 1.0 - 2.0**-53, rng.random(), rng.random(), rng.random()]),
    )


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 300, 5003, 49152])
def test_tokens_are_those_of_the_specification(ops: Ops, vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    random_logits = np.random.default_rng(vocab_size)
    for spread in (0.0, 0.5, 3.0, 30.0):
        logits = torch.from_numpy(random_logits.normal(scale=spread, size=(12, vocab_size)).astype(np.float32)).round(decimals=2)
        draws = [random_draw(rng) for _ in range(12)]
        assert ops.sample(logits, draws) == [sample_row(row.numpy(), draw) for row, draw in zip(logits, draws, strict=True)]


def test_draws_follow_the_filtered_distribution(ops: Ops) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)) * 2
    parameters = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01}
    num_draws = 4000
    draws = [Draw(**parameters, noise=(i + 0.5) / num_draws) for i in range(num_draws)]
    counts = np.bincount(ops.sample(logits.expand(num_draws, 50).contiguous(), draws), minlength=50)
    token_ids, weights = filtered_distribution(logits[0].numpy(), Draw(**parameters))
    expected = np.zeros(50)
    expected[token_ids] = weights / weights.sum() * num_draws
    assert np.abs(counts - expected).max() < 1.5  # evenly spaced noise: each count is exact but for its two borders


def test_tokens_at_minus_infinity_are_never_drawn(ops: Ops) -> None:
    logits = torch.zeros(40, 20)
    logits[:, ::2] = float("-inf")
    tokens = ops.sample(logits, [Draw(temperature=5.0, noise=i / 40) for i in range(40)])
    assert set(tokens) == set(range(1, 20, 2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_maximum_are_named(ops: Ops, bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 19)
    logits[1, 2] = bad
    if bad == float("-inf"):
        logits[1] = bad
    with pytest.raises(FloatingPointError, match=r"rows \[1\]"):
        ops.sample(logits, [Draw(temperature=temperature)] * 3)


def test_logits_of_another_dtype_or_count_are_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match="logits must be contiguous torch.float32"):
        ops.sample(torch.zeros(1, 5, dtype=torch.bfloat16), [Draw()])
    with pytest.raises(ValueError, match="logits"):
        ops.sample(torch.zeros(2, 5), [Draw()])
