"""Chooses the next token of each row from its logits. The noise is keyed, so no generator state exists or travels.

Each row is computed by itself, in fixed order and in fp64: its result depends on its logits and parameters only, never on
its neighbours, the thread count or the process. Filters act in the order temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from common.types import SamplingParams
from engine.batch import SampleRow

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_WORD_MASK = (1 << 64) - 1
_NUCLEUS_PREFIXES = (256, 4096)


class Sampler:
    """Keyed sampling of a batch of rows."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """logits [R, V] of any float dtype, one per row -> token ids [R].

        Raises FloatingPointError for a row whose largest logit is not finite: the model or the memory is broken, and a
        token drawn from it would be a confident wrong answer.
        """
        if logits.shape[0] != len(rows):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} sample rows")
        if not rows:
            return []
        forbidden = [(index, list(row.forbidden_token_ids)) for index, row in enumerate(rows) if row.forbidden_token_ids]
        if forbidden:
            logits = logits.clone()
            for index, token_ids in forbidden:
                logits[index, token_ids] = float("-inf")
        largest, greedy = logits.max(dim=-1)  # among equals torch gives the first index, the lowest id
        if not bool(torch.isfinite(largest).all()):
            broken = [index for index, value in enumerate(largest.tolist()) if not np.isfinite(value)]
            raise FloatingPointError(f"logits of sample rows {broken} have no finite maximum")
        sampled: list[int] = greedy.tolist()
        for index, row in enumerate(rows):
            if not row.sampling.is_greedy:
                sampled[index] = sample_row(logits[index].float().cpu().numpy(), row.sampling, row.token_index)
        return sampled


def sample_row(logits: npt.NDArray[Any], sampling: SamplingParams, token_index: int) -> int:
    """One token from logits [V] by the inverse of the cumulative distribution over ascending token ids."""
    token_ids, weights = filtered_distribution(logits, sampling)
    cumulative = np.cumsum(weights)
    target = uniform(sampling.seed, sampling.choice, token_index) * cumulative[-1]
    # "right": the first token whose cumulative weight exceeds the target, so weight 0 is never drawn. The product can
    # round up to the total; the last token with weight then stands for the missing one.
    index = min(int(np.searchsorted(cumulative, target, side="right")), int(np.searchsorted(cumulative, cumulative[-1])))
    return int(token_ids[index])


def filtered_distribution(logits: npt.NDArray[Any], sampling: SamplingParams) -> tuple[Ids, Floats]:
    """(ascending token ids, unnormalised probabilities > 0 relative to the most likely token) after all filters.

    Ties at a filter's border go to the lowest ids: top-k keeps exactly k, top-p the shortest prefix of the descending
    order whose mass reaches p (arXiv 1904.09751), min-p all tokens of at least p times the largest (arXiv 2407.01082).
    """
    values = logits.astype(np.float64)
    token_ids: Ids = np.arange(values.size, dtype=np.int64)
    if 0 < sampling.top_k < values.size:
        token_ids = _largest(values, sampling.top_k)
        values = values[token_ids]
    weights: Floats = np.exp((values - values.max()) / sampling.temperature)
    if sampling.top_p < 1.0:
        kept = _nucleus(weights, sampling.top_p)
        token_ids, weights = token_ids[kept], weights[kept]
    if sampling.min_p > 0.0:
        kept = np.flatnonzero(weights >= sampling.min_p)  # the largest weight is exactly 1
        token_ids, weights = token_ids[kept], weights[kept]
    return token_ids, weights


def uniform(seed: int, choice: int, token_index: int) -> float:
    """A number in [0, 1) with 53 bits: a pure function of its arguments, equal in every process and on every machine."""
    words = struct.pack("<QQQ", seed & _WORD_MASK, choice, token_index)
    digest = hashlib.blake2b(words, digest_size=8, person=b"baton.sampler").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _largest(values: Floats, count: int) -> Ids:
    """Ascending ids of the `count` largest values, the lowest ids among equals at the border."""
    border = np.partition(values, values.size - count)[values.size - count]
    above = np.flatnonzero(values > border)
    equal = np.flatnonzero(values == border)[: count - above.size]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Ascending positions of the smallest set of largest weights whose sum reaches `top_p` of the total.

    A nucleus is usually a few hundred tokens, so growing prefixes of the descending order are tried before all of it is
    sorted: the same sums in the same order, whichever prefix they are found in.
    """
    target = top_p * float(weights.sum())
    for count in _NUCLEUS_PREFIXES:
        if count < weights.size:
            order = _descending(weights, _largest(weights, count))
            reached = int(np.searchsorted(np.cumsum(weights[order]), target, side="left"))
            if reached < count:
                return np.sort(order[: reached + 1])
    # Tokens below the border can be left out of the sort: together they are less than half of what top-p cuts away.
    order = _descending(weights, np.flatnonzero(weights > 0.5 * (1.0 - top_p) * float(weights.sum()) / weights.size))
    reached = int(np.searchsorted(np.cumsum(weights[order]), target, side="left"))
    return np.sort(order[: reached + 1])


def _descending(weights: Floats, positions: Ids) -> Ids:
    """`positions` (ascending) by falling weight; a stable sort keeps the lowest first among equals."""
    return positions[np.argsort(-weights[positions], kind="stable")]
