"""Times one streamed answer and judges it: the failures of a stream, and whether the tokens that were asked for have come. Pure.

It is fed the lines of the event stream with the time of each, and knows no socket and no locust. Times are monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.bench_stats import RequestRecord
from baton.openai_stream import Endpoint, StreamFailed, Usage, is_done, parse_event

CUT = "stream cut"
NO_DONE = "no [DONE]"
NO_USAGE = "no usage"
NO_TEXT = "no text"
LOST = "tokens lost"
EXTRA = "more tokens than asked"
AFTER_DONE = "event after [DONE]"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as it ended. `num_lost`: how many tokens fewer than asked the server says it made in an answer that it called whole."""

    record: RequestRecord
    num_asked: int
    num_lost: int
    finish_reason: str
    mode: str
    """How our router placed it (`baton.mode` of the timeline), empty when the server does not say."""
    detail: str = ""
    """The server's own words about a failure."""


@dataclass(slots=True)
class StreamMeter:
    """Collects one stream. `feed` each line, then `end` once."""

    label: str
    num_asked: int
    sent_s: float
    endpoint: Endpoint = "chat"
    piece_times_s: list[float] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: str = ""
    mode: str = ""
    has_done: bool = False

    def feed(self, line: str, now_s: float) -> float | None:
        """The seconds since the piece before (for the first: since sending) when the line carries text, else None.

        Raises StreamFailed for an error event, for data that is no JSON object and for anything after `[DONE]`.
        """
        if self.has_done:
            if line.startswith("data:"):
                raise StreamFailed(AFTER_DONE, line[:80])
            return None
        self.has_done = is_done(line)
        chunk = parse_event(line, self.endpoint)
        if chunk is None:
            return None
        self.usage = chunk.usage or self.usage
        self.finish_reason = chunk.finish_reason or self.finish_reason
        ours = chunk.raw.get("baton")
        if isinstance(ours, dict):
            self.mode = str(ours.get("mode") or "")
        if not chunk.text:
            return None
        before_s = self.piece_times_s[-1] if self.piece_times_s else self.sent_s
        self.piece_times_s.append(now_s)
        return now_s - before_s

    def end(self, now_s: float, error: str = "", detail: str = "") -> Outcome:
        """The judgement. `error` is what went wrong outside the events (HTTP, connection, deadline) or the kind of an error event."""
        error = error or self._fault()
        usage = self.usage or Usage(0, 0, 0)
        # Only an answer that came to its end can be short: what a cut stream would still have sent is unknown, and it fails anyway.
        num_lost = max(0, self.num_asked - usage.num_completion_tokens) if self.has_done and self.usage is not None else 0
        counts = (usage.num_prompt_tokens, usage.num_completion_tokens, usage.num_cached_tokens)
        record = RequestRecord(self.sent_s, now_s, tuple(self.piece_times_s), *counts, error, None, self.label)
        return Outcome(record, self.num_asked, num_lost, self.finish_reason, self.mode, detail)

    def _fault(self) -> str:
        """What is wrong with a stream whose body ended in order; empty for nothing."""
        if not self.has_done:
            return NO_DONE
        if self.usage is None:
            return NO_USAGE
        if self.usage.num_completion_tokens < self.num_asked:
            return LOST
        if self.usage.num_completion_tokens > self.num_asked:
            return EXTRA
        return "" if self.piece_times_s else NO_TEXT
