"""The calls of one HTTP request, one for each of its prompts, and their output as one sequence of items.

Items of one call keep their order; between calls nobody waits for a slower one, and none is starved. Owns nothing of a call but the
turn in which its output is taken; choice indexes are those of the response.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import BatonError
from router.call import Call
from router.output import Ended, Errored, OutputItem, OutputSignals, Usage


class Answer:
    """One reader. After an Errored, or the Ended of every call, nothing more comes."""

    def __init__(self, calls: Sequence[Call], signals: OutputSignals) -> None:
        self.calls = tuple(calls)
        self._signals = signals
        self._open = list(range(len(self.calls)))
        self._turn = 0
        self._usages: list[Usage] = []

    @property
    def is_over(self) -> bool:
        """Whether every call has ended."""
        return not self._open

    @property
    def usage(self) -> Usage:
        """Of all prompts and choices that have ended."""
        return Usage(
            sum(usage.num_prompt_tokens for usage in self._usages),
            sum(usage.num_completion_tokens for usage in self._usages),
            sum(usage.num_cached_tokens for usage in self._usages),
        )

    async def get(self) -> tuple[int, OutputItem]:
        """The next item and the choice it belongs to. Cancelling it loses nothing."""
        while True:
            for _ in range(len(self._open)):
                self._turn = (self._turn + 1) % len(self._open)
                index = self._open[self._turn]
                item = self.calls[index].output.take()
                if item is None:
                    continue
                if isinstance(item, Ended | Errored):
                    self._open.remove(index)
                if isinstance(item, Ended):
                    self._usages.append(item.usage)
                return index, item
            self._signals.wake.clear()
            await self._signals.wake.wait()

    async def overflowed(self) -> None:
        """Returns when the client fell too far behind with one of the calls."""
        await self._signals.overflowed.wait()

    def cancel(self, error: BatonError) -> None:
        for call in self.calls:
            call.cancel(error)
