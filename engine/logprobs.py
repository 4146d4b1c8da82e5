"""How likely the model found a token: log-probabilities of its plain distribution, with the most likely alternatives.

A function of one row of logits alone, computed row by row, so a token's numbers do not depend on its batch, the threads or which worker
computed it. Natural logarithms; logits are fp32, sums fp64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.types import TokenLogprobs


def token_logprobs(logits: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    """logits [V] as the model gave them. The `num_top` most likely tokens, most likely first, the lower id first of equals."""
    values = logits.astype(np.float64)
    largest = values.max()
    normaliser = largest + np.log(np.exp(values - largest).sum())
    return TokenLogprobs(
        float(values[token_id] - normaliser),
        tuple((int(i), float(values[i] - normaliser)) for i in most_likely(values, num_top)),
    )


def most_likely(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest values in falling order; of equals, at the border too, the lower ids."""
    count = min(count, values.size)
    if count == 0:
        return np.empty(0, np.int64)
    border = np.partition(values, values.size - count)[values.size - count]
    candidates = np.flatnonzero(values >= border)
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]
