"""Refuses sequences that the engine could never serve, before anything is allocated for them.

The services have validated requests already; this is the engine thread's own guard, because one bad request must not end it for
everyone. Pure functions that raise InvalidRequest with the quantities; lengths are tokens unless a name says blocks.
"""

from __future__ import annotations

from common.errors import InvalidRequest
from engine.commands import SequenceSpec
from engine.sequence import Sequence, num_blocks_for

TOKEN_ID_END = 1 << 32
"""Token ids lie below this: prefix keys pack them as 32-bit words. The services check against the vocabulary."""


def check_spec(spec: SequenceSpec) -> None:
    """Raises InvalidRequest if the numbers of a spec contradict each other."""
    num_tokens, num_emitted = len(spec.token_ids), len(spec.token_ids) - spec.num_prompt_tokens
    if not 0 < spec.num_prompt_tokens <= num_tokens:
        raise InvalidRequest(f"{spec.num_prompt_tokens} of {num_tokens} tokens are called the prompt", param="prompt")
    if spec.stop.max_new_tokens <= num_emitted:
        message = f"max_new_tokens is {spec.stop.max_new_tokens}, but {num_emitted} completion tokens exist already"
        raise InvalidRequest(message, param="max_tokens")
    if min(spec.token_ids) < 0 or max(spec.token_ids) >= TOKEN_ID_END:
        raise InvalidRequest(f"token ids reach from {min(spec.token_ids)} to {max(spec.token_ids)}", param="prompt")


def check_size(sequence: Sequence, max_sequence_tokens: int, block_size: int, num_blocks: int) -> None:
    """Raises InvalidRequest if the sequence at its longest exceeds the limit, or the whole pool."""
    num_tokens, num_prompt = sequence.num_tokens_max, sequence.spec.num_prompt_tokens
    if num_tokens > max_sequence_tokens:
        message = (
            f"prompt ({num_prompt} tokens) and completion (up to {num_tokens - num_prompt}) exceed {max_sequence_tokens} tokens"
        )
        raise InvalidRequest(message, param="max_tokens")
    num_blocks_needed = num_blocks_for(num_tokens - 1, block_size)
    if num_blocks_needed > num_blocks:
        message = f"{num_tokens} tokens need {num_blocks_needed} KV blocks, this worker has {num_blocks}"
        raise InvalidRequest(message, param="max_tokens")
