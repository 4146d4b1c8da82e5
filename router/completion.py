"""The completion of one request as it grows: tokens in, releasable text and the finish reason out.

Joins detokenizer, stop strings and the stop rules a token alone can tell, across all attempts of the request. Pure; it knows no
workers and no sockets, and gives the same text however the tokens were batched.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.types import FinishReason, StopConditions
from router.detokenize import Detokenizer, StopMatcher


class Completion:
    """`finish_reason` is set by the token or stop string that ends the completion; later tokens are ignored.

    `num_tokens` counts the tokens that belong to the completion, a final stop token included. `offsets` says for each of them how
    many characters came before it, stop strings not cut off; kept only if asked for.
    """

    def __init__(
        self, stop: StopConditions, stop_strings: Sequence[str], detokenizer: Detokenizer, *, keeps_offsets: bool = False
    ) -> None:
        self._stop = stop
        self._stop_token_ids = frozenset(stop.stop_token_ids)
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop_strings)
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.matched_stop_string = False
        self.offsets: list[int] = []
        self._keeps_offsets = keeps_offsets
        self._num_chars = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens in index order and returns the text that may go to the client now."""
        pieces: list[str] = []
        for token_id in token_ids:
            if self.finish_reason is not None:
                break
            pieces.append(self._push_one(token_id))
        return "".join(pieces)

    def finish(self, reason: FinishReason) -> str:
        """Ends the completion for a reason only the worker knew; returns the text that was held back."""
        if self.finish_reason is not None:
            return ""
        self.finish_reason = reason
        return self._release()

    def _push_one(self, token_id: int) -> str:
        self.num_tokens += 1
        if self._keeps_offsets:
            self.offsets.append(self._num_chars)
        if token_id in self._stop_token_ids and self.num_tokens > self._stop.min_new_tokens:
            return self.finish(FinishReason.STOP)
        piece = self._detokenizer.push(token_id)
        self._num_chars += len(piece)
        if self.num_tokens <= self._stop.min_new_tokens:
            text = self._matcher.release(piece)  # not armed yet: this text can be no part of a match
        else:
            result = self._matcher.push(piece)
            text = result.text
            if result.is_stopped:
                self.finish_reason = FinishReason.STOP
                self.matched_stop_string = True
                return text
        if self.num_tokens >= self._stop.max_new_tokens:
            text += self.finish(FinishReason.LENGTH)
        return text

    def _release(self) -> str:
        """The last text: the detokenizer's rest may itself complete a stop string."""
        result = self._matcher.push(self._detokenizer.finish())
        if result.is_stopped:
            self.finish_reason = FinishReason.STOP
            self.matched_stop_string = True
            return result.text
        return result.text + self._matcher.release()
