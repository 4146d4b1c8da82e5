"""Chooses the next token of each row from its logits. The noise is keyed, so no generator state exists or travels.

Owns the noise and all that changes logits before the draw (penalties, bias, forbidden tokens); the arithmetic of the draw is an
operation of the device (kernels/sampling.py is its specification). A row's result depends on its logits, parameters and known tokens
only, never on its neighbours, the threads or the process.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from common.types import SamplingParams, TokenLogprobs
from engine.batch import SampleRow
from engine.logprobs import token_logprobs
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
        changed = [index for index, row in enumerate(rows) if row.forbidden_token_ids or row.extras is not None]
        if changed:
            logits = logits.clone()  # the model's own are still wanted for logprobs
            for index in changed:
                change_logits(logits[index], rows[index])
        return self._ops.sample(logits, [make_draw(row.sampling, row.token_index) for row in rows])

    def rate(self, logits: torch.Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]) -> Sequence[TokenLogprobs | None]:
        """Logprobs of the sampled tokens where they are wanted, from the logits as the model gave them; empty if nowhere."""
        wanted = [row.extras.num_logprobs if row.extras is not None else None for row in rows]
        if all(num_top is None for num_top in wanted):
            return ()
        return [
            None if num_top is None else token_logprobs(logits[index].cpu().numpy(), token_ids[index], num_top)
            for index, num_top in enumerate(wanted)
        ]


def rate_prompt(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Logprobs of prompt tokens: row i of the logits [N, V] rates `token_ids[i]`."""
    rows = logits.cpu().numpy()
    return tuple(token_logprobs(row, token_id, num_top) for row, token_id in zip(rows, token_ids, strict=True))


def change_logits(logits: torch.Tensor, row: SampleRow) -> None:
    """In place on one row [V], in this order: repetition, frequency and presence penalty, bias, forbidden tokens."""
    sampling, device = row.sampling, logits.device
    counts = row.extras.counts if row.extras is not None else None
    if counts is not None and sampling.repetition_penalty != 1.0:
        ids = torch.from_numpy(counts.known_ids()).to(device)
        values, penalty = logits[ids], sampling.repetition_penalty
        logits[ids] = torch.where(values > 0, values / penalty, values * penalty)
    if counts is not None and (sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0):
        own_ids, occurrences = (torch.from_numpy(part).to(device) for part in counts.completion_counts())
        logits[own_ids] -= sampling.frequency_penalty * occurrences + sampling.presence_penalty
    if sampling.logit_bias:
        bias_ids = torch.tensor([token_id for token_id, _ in sampling.logit_bias], device=device)
        logits[bias_ids] += torch.tensor([bias for _, bias in sampling.logit_bias], dtype=logits.dtype, device=device)
    if row.forbidden_token_ids:
        logits[list(row.forbidden_token_ids)] = float("-inf")


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
