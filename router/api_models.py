"""The shapes of request bodies as text from outside: strict pydantic models, and the table of what we do not offer yet.

Strict means: no coercion (a boolean is not a number, "1" is not 1), no unknown field, no NaN or infinity. A parameter of the
OpenAI or vLLM surface that is not supported is accepted only with a value that changes nothing, else refused by name.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

LOGPROBS_MAX = 20
LOGIT_BIAS_MAX = 1024
TokenIdField = Annotated[int, Field(ge=0, lt=2**32)]


class StreamOptions(BaseModel):
    model_config = _STRICT

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class GenerationRequest(BaseModel):
    """What both generation endpoints share. Ranges that depend on the model are checked in `validation`."""

    model_config = _STRICT

    model: str
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenIdField], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]], Field(max_length=LOGIT_BIAS_MAX)] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    timeline: bool | None = None


class CompletionRequest(GenerationRequest):
    """`prompt` is checked by hand in `validation`: a union of list types would try each member on every token id."""

    prompt: Any
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None


class TextPart(BaseModel):
    model_config = _STRICT

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = _STRICT

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: Literal[None] = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal[None] = None
    audio: Literal[None] = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None


class TokenizeRequest(BaseModel):
    """`/tokenize` as vLLM has it: either a text or chat messages."""

    model_config = _STRICT

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(BaseModel):
    model_config = _STRICT

    model: str | None = None
    tokens: list[TokenIdField]


UNSUPPORTED_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "best_of": (1,),
    "suffix": (),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "prediction": (),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
"""Parameters users send that we do not offer, with the values (beside null) that ask for nothing and are accepted."""


def is_neutral(name: str, value: Any) -> bool:
    """Whether this value of an unsupported parameter asks for nothing. Compares as JSON: true is not 1, 0 equals 0.0 by listing both."""
    if value is None:
        return True
    text = json.dumps(value, sort_keys=True)
    return any(text == json.dumps(neutral, sort_keys=True) for neutral in UNSUPPORTED_PARAMETERS[name])
