"""The keyed sampler: which tokens the filters keep, how close draws follow softmax, and what a row may depend on."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from common.types import SamplingParams
from engine.batch import SampleRow
from engine.sampler import Sampler, make_draw, uniform
from kernels.ops import Draw
from kernels.reference import ReferenceOps
from kernels.sampling import filtered_distribution, sample_row

LOGITS = np.log(np.array([0.05, 0.30, 0.10, 0.30, 0.25], dtype=np.float32))


def kept(**parameters: float) -> list[int]:
    token_ids, _ = filtered_distribution(LOGITS, Draw(**parameters))  # type: ignore[arg-type]
    return [int(token_id) for token_id in token_ids]


def row(sampling: SamplingParams, token_index: int = 0, forbidden: tuple[int, ...] = ()) -> SampleRow:
    return SampleRow(0, token_index, sampling, forbidden)


def test_without_filters_every_token_stays_with_its_softmax_probability() -> None:
    token_ids, weights = filtered_distribution(LOGITS, Draw())
    assert token_ids.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(weights / weights.sum(), [0.05, 0.30, 0.10, 0.30, 0.25], atol=1e-7)


def test_top_k_keeps_exactly_k_and_gives_ties_to_the_lowest_ids() -> None:
    assert kept(top_k=1) == [1]
    assert kept(top_k=2) == [1, 3]
    assert kept(top_k=3) == [1, 3, 4]
    assert kept(top_k=5) == kept(top_k=0) == kept(top_k=99) == [0, 1, 2, 3, 4]
    ties = np.zeros(1000, dtype=np.float32)
    assert filtered_distribution(ties, Draw(top_k=7))[0].tolist() == list(range(7))


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.0, [1]),
        (0.29, [1]),
        (0.31, [1, 3]),
        (0.59, [1, 3]),
        (0.61, [1, 3, 4]),
        (0.84, [1, 3, 4]),
        (0.86, [1, 2, 3, 4]),
        (1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_top_p_keeps_the_shortest_prefix_that_reaches_the_mass(top_p: float, expected: list[int]) -> None:
    assert kept(top_p=top_p) == expected


def test_top_p_equals_a_full_sort_on_a_large_vocabulary() -> None:
    random = np.random.default_rng(1)
    for top_p in (0.05, 0.5, 0.9, 0.99, 0.9999):
        logits = random.normal(scale=3, size=5000).astype(np.float32)
        weights = np.exp(logits.astype(np.float64) - logits.max())
        order = np.argsort(-weights, kind="stable")
        length = int(np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum())) + 1
        token_ids, _ = filtered_distribution(logits, Draw(top_p=top_p))
        assert token_ids.tolist() == sorted(order[:length].tolist())


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    assert kept(min_p=0.1) == [0, 1, 2, 3, 4]  # border at 0.03
    assert kept(min_p=0.3) == [1, 2, 3, 4]  # border at 0.09
    assert kept(min_p=0.9) == [1, 3]
    assert kept(min_p=1.0) == [1, 3]


def test_filters_act_in_the_order_temperature_top_k_top_p_min_p() -> None:
    # After top-k 3 the masses are 0.353, 0.353, 0.294: top-p 0.7 is reached by two tokens, without top-k it needs three.
    assert kept(top_k=3, top_p=0.7) == [1, 3]
    assert kept(top_p=0.7) == [1, 3, 4]
    # A high temperature flattens before min-p looks.
    assert kept(min_p=0.5) == [1, 3, 4]
    assert kept(min_p=0.5, temperature=10.0) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_of_many_seeds_follow_the_softmax(temperature: float) -> None:
    num_draws = 20000
    counts = np.zeros(LOGITS.size)
    for seed in range(num_draws):
        counts[sample_row(LOGITS, make_draw(SamplingParams(temperature=temperature, seed=seed), 0))] += 1
    expected = np.exp(LOGITS / temperature)
    expected /= expected.sum()
    # The seeds are fixed, so this is deterministic; four standard deviations is what chance would allow.
    border = 4 * np.sqrt(expected * (1 - expected) / num_draws)
    assert (np.abs(counts / num_draws - expected) < border).all()


@pytest.mark.parametrize("varied", ["seed", "choice", "token_index"])
def test_noise_is_uniform_and_uncorrelated_along_each_argument(varied: str) -> None:
    values = np.array([uniform(**({"seed": 3, "choice": 0, "token_index": 5} | {varied: n})) for n in range(20000)])
    assert values.min() >= 0.0 and values.max() < 1.0
    assert np.abs(np.histogram(values, bins=20, range=(0, 1))[0] / 1000 - 1).max() < 0.13
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    assert len(set(values.tolist())) == 20000


def test_noise_has_fixed_values_and_takes_seeds_of_any_sign() -> None:
    assert uniform(0, 0, 0) == 0.13062365653471675
    assert uniform(-1, 0, 0) == uniform((1 << 64) - 1, 0, 0)
    assert len({uniform(1, 0, 0), uniform(0, 1, 0), uniform(0, 0, 1)}) == 3


def test_noise_and_draws_are_the_same_in_another_process_with_another_hash_seed() -> None:
    program = (
        "import numpy as np; from common.types import SamplingParams; from engine.sampler import make_draw, uniform\n"
        "from kernels.sampling import sample_row\n"
        "x = np.random.default_rng(5).normal(size=500).astype(np.float32)\n"
        "drawn = [sample_row(x, make_draw(SamplingParams(seed=9, top_p=0.9), i)) for i in range(20)]\n"
        "print([uniform(7, 1, i) for i in range(5)], drawn)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    logits = np.random.default_rng(5).normal(size=500).astype(np.float32)
    here = [sample_row(logits, make_draw(SamplingParams(seed=9, top_p=0.9), index)) for index in range(20)]
    assert outputs == {f"{[uniform(7, 1, index) for index in range(5)]} {here}\n"}


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(9, 4099, generator=torch.Generator().manual_seed(3)) * 3
    rows = [
        SampleRow(
            index,
            index * 3,
            SamplingParams(temperature=[0.0, 0.7, 1.3][index % 3], top_p=0.95, top_k=index * 40, seed=index),
            (index, 17),
        )
        for index in range(9)
    ]
    sampler = Sampler(ReferenceOps())
    together = sampler.sample(logits, rows)
    alone = [sampler.sample(logits[index : index + 1], [rows[index]])[0] for index in range(9)]
    reversed_order = sampler.sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == reversed_order


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, 50000)
    logits[0, [49999, 333, 20000]] = 2.0
    assert Sampler(ReferenceOps()).sample(logits, [row(SamplingParams(temperature=0.0))] * 2) == [333, 0]


def test_forbidden_tokens_are_never_sampled_and_the_callers_logits_stay() -> None:
    logits = torch.tensor([[9.0, 1.0, 8.0, 0.0]])
    before = logits.clone()
    assert Sampler(ReferenceOps()).sample(logits, [row(SamplingParams(temperature=0.0), forbidden=(0,))]) == [2]
    drawn = {
        Sampler(ReferenceOps()).sample(logits, [row(SamplingParams(temperature=5.0, seed=seed), forbidden=(0, 2))])[0]
        for seed in range(50)
    }
    assert drawn == {1, 3}
    assert torch.equal(logits, before)


def test_tiny_temperature_is_greedy_without_overflow() -> None:
    logits = torch.tensor([[1000.0, -1000.0, 1000.5]])
    assert {
        Sampler(ReferenceOps()).sample(logits, [row(SamplingParams(temperature=1e-6, seed=seed))])[0] for seed in range(20)
    } == {2}


def test_the_top_of_the_noise_range_draws_the_last_token_with_weight() -> None:
    logits = np.array([0.0, 0.0, -np.inf], dtype=np.float32)
    assert sample_row(logits, Draw(noise=1.0 - 2.0**-53)) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_an_error_and_never_a_token(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    with pytest.raises(FloatingPointError, match=r"rows \[1\]"):
        Sampler(ReferenceOps()).sample(logits, [row(SamplingParams(temperature=0.0))] * 3)


def test_a_row_whose_tokens_are_all_forbidden_is_an_error() -> None:
    with pytest.raises(FloatingPointError):
        Sampler(ReferenceOps()).sample(torch.zeros(1, 2), [row(SamplingParams(temperature=0.0), forbidden=(0, 1))])


def test_no_rows_give_no_tokens_and_a_wrong_count_is_refused() -> None:
    assert Sampler(ReferenceOps()).sample(torch.zeros(0, 5), []) == []
    with pytest.raises(ValueError, match="2 rows of logits for 1"):
        Sampler(ReferenceOps()).sample(torch.zeros(2, 5), [row(SamplingParams())])
