"""Chooses the next token of each row from its logits. The noise is keyed, so no generator state exists or travels.

Owns the noise and the tokens that may not be sampled; the arithmetic is an operation of the device (kernels/sampling.py is its
specification). A row's result depends on its logits and parameters only, never on its neighbours, the threads or the process.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from common.types import SamplingParams
from engine.batch import SampleRow
from kernels.ops import Draw, Ops

_WORD_MASK = (1 << 64) - 1
_GREEDY = Draw(temperature=0.0)


class Sampler:
    """Keyed sampling of a batch of rows."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """fp32 logits [R, V], one per row -> token ids [R].

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
        return self._ops.sample(logits, [make_draw(row.sampling, row.token_index) for row in rows])


def make_draw(sampling: SamplingParams, token_index: int) -> Draw:
    """All that decides the token of one row beside its logits."""
    if sampling.is_greedy:
        return _GREEDY
    noise = uniform(sampling.seed, sampling.choice, token_index)
    return Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, noise)


def uniform(seed: int, choice: int, token_index: int) -> float:
    """A number in [0, 1) with 53 bits: a pure function of its arguments, equal in every process and on every machine."""
    words = struct.pack("<QQQ", seed & _WORD_MASK, choice, token_index)
    digest = hashlib.blake2b(words, digest_size=8, person=b"baton.sampler").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
