"""The choice of a token from one row of logits in plain numpy: the specification of every sampling kernel.

Filters act in the order temperature, top-k, top-p, min-p; the token is drawn by the inverse of the cumulative distribution over
ascending token ids. Arithmetic in fp64, sums from left to right, so the result is a function of the logits and the draw alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.ops import Draw

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_NUCLEUS_PREFIXES = (256, 4096)


def sample_row(logits: npt.NDArray[Any], draw: Draw) -> int:
    """One token from logits [V]. Raises FloatingPointError when the largest logit is not finite."""
    largest = logits.max()
    if not np.isfinite(largest):
        raise FloatingPointError(f"the largest logit is {largest}")
    if draw.temperature == 0.0:
        return int(logits.argmax())  # the first, so the lowest id among equals
    token_ids, weights = filtered_distribution(logits, draw)
    cumulative = np.cumsum(weights)
    target = draw.noise * cumulative[-1]
    # "right": the first token whose cumulative weight exceeds the target, so weight 0 is never drawn. The product can
    # round up to the total; the last token with weight then stands for the missing one.
    index = min(int(np.searchsorted(cumulative, target, side="right")), int(np.searchsorted(cumulative, cumulative[-1])))
    return int(token_ids[index])


def filtered_distribution(logits: npt.NDArray[Any], draw: Draw) -> tuple[Ids, Floats]:
    """(ascending token ids, unnormalised probabilities relative to the most likely token) after all filters.

    Ties at a filter's border go to the lowest ids: top-k keeps exactly k, top-p the shortest prefix of the descending
    order whose mass reaches p (arXiv 1904.09751), min-p all tokens of at least p times the largest (arXiv 2407.01082).
    """
    values = logits.astype(np.float64)
    token_ids: Ids = np.arange(values.size, dtype=np.int64)
    if 0 < draw.top_k < values.size:
        token_ids = _largest(values, draw.top_k)
        values = values[token_ids]
    weights: Floats = np.exp((values - values.max()) / draw.temperature)
    if draw.top_p < 1.0:
        kept = _nucleus(weights, draw.top_p)
        token_ids, weights = token_ids[kept], weights[kept]
    if draw.min_p > 0.0:
        kept = np.flatnonzero(weights >= draw.min_p)  # the largest weight is exactly 1
        token_ids, weights = token_ids[kept], weights[kept]
    return token_ids, weights


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
    target = top_p * float(np.cumsum(weights)[-1])
    for count in (*_NUCLEUS_PREFIXES, weights.size):
        if count <= weights.size:
            order = _descending(weights, _largest(weights, count))
            reached = int(np.searchsorted(np.cumsum(weights[order]), target, side="left"))
            if reached < count:
                return np.sort(order[: reached + 1])
    return np.arange(weights.size, dtype=np.int64)  # the sum in falling order can round to just below the target


def _descending(weights: Floats, positions: Ids) -> Ids:
    """`positions` (ascending) by falling weight; a stable sort keeps the lowest first among equals."""
    return positions[np.argsort(-weights[positions], kind="stable")]
