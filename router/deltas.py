"""What a completion's text turns into for a chat client: content, reasoning and tool calls, piece by piece. Pure values.

A parser belongs to one choice of one request and sees its text once, in order, however it was cut; a model without special formats
has none, and its text is all content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of tool call number `index` (from 0). The first piece of a call has its `call_id` and `name`, later ones have neither.

    The `arguments` of all pieces joined are the JSON text of the call's arguments.
    """

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


Delta = ContentDelta | ReasoningDelta | ToolCallDelta


class TextParser(Protocol):
    """One per choice. Joining the deltas gives the same result however the text was cut into pieces."""

    @property
    def num_tool_calls(self) -> int:
        """Calls begun so far; more than 0 at the end makes the finish reason `tool_calls` where it would be `stop`."""
        ...

    def push(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]:
        """What was held back, when the text has ended. Text that only looked like the beginning of a call comes back as content."""
        ...
