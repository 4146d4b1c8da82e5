"""Penalties, bias and logprobs against plain formulas, and what must not change them: batches and where the sequence was before."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from common.ids import AttemptKey, RequestId
from common.types import SamplingParams, StopConditions, TokenLogprobs
from engine.batch import RowExtras, SampleRow
from engine.commands import SequenceSpec
from engine.logprobs import token_logprobs
from engine.sampler import Sampler, change_logits
from engine.sequence import Kind, Sequence, row_extras
from engine.token_counts import TokenCounts
from kernels.reference import ReferenceOps

VOCAB = 50
PROMPT, COMPLETION = [3, 4, 4, 5], [4, 7, 7, 7, 9]


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def row_of(sampling: SamplingParams, forbidden: tuple[int, ...] = (), num_logprobs: int | None = None) -> SampleRow:
    known = PROMPT + COMPLETION
    extras = RowExtras(known, len(PROMPT), num_logprobs, counts=TokenCounts(known, len(PROMPT)))
    return SampleRow(0, len(COMPLETION), sampling, forbidden, extras)


def expected(logits: torch.Tensor, sampling: SamplingParams, forbidden: tuple[int, ...] = ()) -> list[float]:
    """Token by token, as the descriptions of the parameters say it."""
    result = []
    bias = dict(sampling.logit_bias)
    for token_id, value in enumerate(np.float32(logits.numpy())):
        if token_id in PROMPT + COMPLETION:
            penalty = np.float32(sampling.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        if (count := COMPLETION.count(token_id)) > 0:
            value = value - np.float32(sampling.frequency_penalty * count + sampling.presence_penalty)
        value = value + np.float32(bias.get(token_id, 0.0))
        result.append(-math.inf if token_id in forbidden else float(value))
    return result


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.7),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(presence_penalty=-1.5),
        SamplingParams(logit_bias=((7, -100.0), (11, 2.5))),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.25, presence_penalty=0.5, logit_bias=((4, 1.0), (9, -3.0))),
    ],
)
def test_changes_follow_the_formulas_in_order(sampling: SamplingParams) -> None:
    for seed in range(3):
        logits = logits_of(seed)
        changed = logits.clone()
        change_logits(changed, row_of(sampling, forbidden=(2, 9)))
        np.testing.assert_allclose(changed.numpy(), expected(logits, sampling, (2, 9)), rtol=1e-6, atol=1e-6)


def test_counts_grow_with_the_sequence_and_equal_those_of_a_new_one() -> None:
    known = list(PROMPT)
    counts = TokenCounts(known, len(PROMPT))
    assert counts.completion_counts()[0].size == 0
    for token_id in COMPLETION:
        known.append(token_id)
        rebuilt = TokenCounts(list(known), len(PROMPT))
        assert counts.known_ids().tolist() == rebuilt.known_ids().tolist() == sorted(set(known))
        assert [part.tolist() for part in counts.completion_counts()] == [part.tolist() for part in rebuilt.completion_counts()]
    assert dict(zip(*(part.tolist() for part in counts.completion_counts()), strict=True)) == {4: 1, 7: 3, 9: 1}


def test_penalised_row_is_the_same_alone_and_among_others_and_leaves_the_logits_alone() -> None:
    sampler = Sampler(ReferenceOps())
    sampling = SamplingParams(temperature=0.0, repetition_penalty=5.0, frequency_penalty=2.0)
    batch = torch.stack([logits_of(seed) for seed in range(4)])
    before = batch.clone()
    plain = SampleRow(0, 0, SamplingParams(temperature=0.0))
    alone = sampler.sample(batch[2:3], [row_of(sampling)])
    together = sampler.sample(batch, [plain, plain, row_of(sampling), plain])
    assert together[2] == alone[0]
    assert together[0] == int(batch[0].argmax()) and together[3] == int(batch[3].argmax())
    assert torch.equal(batch, before)


def test_bias_can_force_and_ban_a_token() -> None:
    sampler = Sampler(ReferenceOps())
    logits = logits_of(1).unsqueeze(0)
    best = int(logits.argmax())
    for forced in (0, 17, VOCAB - 1):
        row = row_of(SamplingParams(temperature=0.0, logit_bias=((forced, 100.0),)))
        assert sampler.sample(logits, [row]) == [forced]
    assert sampler.sample(logits, [row_of(SamplingParams(temperature=0.0, logit_bias=((best, -100.0),)))]) != [best]


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    sampler = Sampler(ReferenceOps())
    logits = torch.stack([logits_of(1), logits_of(2)])
    row = row_of(SamplingParams(temperature=0.0, logit_bias=((17, 100.0),)), num_logprobs=3)
    token_ids = sampler.sample(logits, [SampleRow(0, 0, SamplingParams(temperature=0.0)), row])
    plain, rated = sampler.rate(logits, [SampleRow(0, 0, SamplingParams(temperature=0.0)), row], token_ids)
    assert plain is None and isinstance(rated, TokenLogprobs)
    expected = torch.log_softmax(logits[1].double(), dim=0)
    assert rated.logprob == pytest.approx(float(expected[17]), abs=1e-12)
    top = torch.topk(expected, 3)
    assert [token_id for token_id, _ in rated.top] == top.indices.tolist()
    assert [value for _, value in rated.top] == pytest.approx(top.values.tolist(), abs=1e-12)
    assert sampler.rate(logits[:1], [SampleRow(0, 0, SamplingParams())], [1]) == ()


def test_equal_alternatives_come_in_the_order_of_their_ids() -> None:
    logits = np.array([1.0, 5.0, 5.0, 0.0, 5.0, 5.0], dtype=np.float32)
    assert [token_id for token_id, _ in token_logprobs(logits, 0, 3).top] == [1, 2, 4]
    assert token_logprobs(logits, 3, 0).top == ()
    assert len(token_logprobs(logits, 0, 20).top) == 6


def test_plain_sequences_have_no_extras_and_others_see_their_own_growing_tokens() -> None:
    def spec(sampling: SamplingParams, num_logprobs: int | None = None) -> SequenceSpec:
        key = AttemptKey(RequestId("r"), 1)
        return SequenceSpec(key, (1, 2, 3), 2, sampling, StopConditions(8), num_logprobs=num_logprobs)

    assert Sequence(spec(SamplingParams()), Kind.GENERATE, 1).extras is None
    for extra in (SamplingParams(presence_penalty=1.0), SamplingParams(logit_bias=((1, 1.0),))):
        assert row_extras(spec(extra), [1, 2, 3]) is not None
    sequence = Sequence(spec(SamplingParams(frequency_penalty=1.0), num_logprobs=2), Kind.GENERATE, 1)
    sequence.token_ids.append(9)
    assert sequence.extras is not None and sequence.extras.counts is not None and sequence.extras.num_logprobs == 2
    assert dict(zip(*(part.tolist() for part in sequence.extras.counts.completion_counts()), strict=True)) == {3: 1, 9: 1}
