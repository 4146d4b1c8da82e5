"""The request after validation: a type of its own, so that nothing unvalidated can reach placement or a worker.

Owns no behaviour beyond small derived numbers; knows nothing of HTTP bodies, workers or sockets. Token counts are in
tokens, the deadline is a monotonic time of this host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.ids import RequestId
from common.types import SamplingParams, StopConditions


class Endpoint(Enum):
    """Which of the two generation endpoints was called; `value` is the `object` of its full response."""

    CHAT = "chat.completion"
    COMPLETION = "text_completion"

    @property
    def chunk_object(self) -> str:
        return "chat.completion.chunk" if self is Endpoint.CHAT else "text_completion"

    @property
    def id_prefix(self) -> str:
        return "chatcmpl" if self is Endpoint.CHAT else "cmpl"


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What the front door knows of a request beside its body.

    `key_id` names the API key in logs, limits and fairness (never the key itself; "" without access control). `cache_salt` separates
    tenants in the prefix cache. `deadline_s`: seconds from arrival that the client allows, 0 for the operator's limit alone.
    """

    key_id: str = ""
    cache_salt: bytes = b""
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """Everything the orchestrator needs, checked against the model and the fleet's limits.

    `stop.stop_token_ids` already contains the model's end-of-sequence tokens unless `ignore_eos`. `stop_strings` are
    matched on the text by the router and never reach a worker.
    """

    request_id: RequestId
    endpoint: Endpoint
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopConditions
    stop_strings: tuple[str, ...]
    num_logprobs: int | None  # alternatives with each token, None for no logprobs
    echoes_prompt: bool  # the answer begins with the prompt, and with its logprobs where those are wanted
    has_completion: bool  # False: only the prompt is wanted; one token is computed and not shown
    stream: bool
    include_usage: bool
    wants_timeline: bool
    context: RequestContext

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives with each prompt token; None where the prompt is not rated."""
        return self.num_logprobs if self.echoes_prompt else None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens_max(self) -> int:
        """Prompt plus the most completion tokens it may grow to."""
        return len(self.prompt_token_ids) + self.stop.max_new_tokens
