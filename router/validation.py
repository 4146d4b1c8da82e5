"""From bytes of a request body to a ValidRequest: parse, check against the model and the limits, tokenise once.

Everything a client can get wrong ends here as InvalidRequest (or ModelNotFound) with the field in `param`, before any byte of an answer.
Knows no workers; the longest sequence the fleet can hold comes in as a number of tokens.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

import pydantic

from common.errors import InvalidRequest, ModelNotFound
from common.ids import RequestId
from common.types import SamplingParams, StopConditions
from router.api_models import (
    UNSUPPORTED_PARAMETERS,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
    is_neutral,
)
from router.request import Endpoint, RequestContext, ValidRequest
from router.tokenizer import ModelTokenizer

NO_CONTEXT = RequestContext()
Body = TypeVar("Body", bound=pydantic.BaseModel)
COMPLETION_MAX_TOKENS_DEFAULT = 16
"""OpenAI's default of /v1/completions when `max_tokens` is absent; null means: what fits."""
STOP_CHARS_MAX = 1024
PROMPTS_MAX = 64
"""Prompts of one request: each is served as a request of its own."""
_PARAMS_SHOWN_MAX = 10


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises InvalidRequest for bad UTF-8, bad JSON, NaN and Infinity, or anything but an object."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the request body is not valid UTF-8 (byte {error.start})", code="invalid_json") from error
    except RecursionError as error:
        raise InvalidRequest("the request body is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the request body must be a JSON object, not {_json_type(value)}", code="invalid_json")
    return value


def parse_generation(model: type[Body], raw: dict[str, Any]) -> Body:
    """Checks names and types of a body. Neutral values of unsupported parameters are dropped, all others refused by name."""
    supported = {}
    for name, value in raw.items():
        if name in model.model_fields or name not in UNSUPPORTED_PARAMETERS:
            supported[name] = value
        elif not is_neutral(name, value):
            raise InvalidRequest(f"'{name}' is not supported by this server", param=name, code="unsupported_parameter")
    return parse_model(model, supported)


def parse_model(model: type[Body], raw: dict[str, Any]) -> Body:
    """Strict pydantic validation with the first problem as InvalidRequest; unknown fields are named all at once."""
    try:
        return model.model_validate(raw)
    except pydantic.ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [_location(p["loc"]) for p in problems if p["type"] == "extra_forbidden"]
    if unknown:
        names = ", ".join(f"'{name[:64]}'" for name in unknown[:_PARAMS_SHOWN_MAX])
        raise InvalidRequest(
            f"unknown field{'s' if len(unknown) > 1 else ''}: {names}", param=unknown[0][:64], code="unknown_parameter"
        )
    param = _location(problems[0]["loc"])
    reasons = dict.fromkeys(p["msg"] for p in problems if _location(p["loc"]) == param)
    raise InvalidRequest(f"'{param}': {'; or '.join(reasons)}", param=param, code="invalid_value")


class Validator:
    """Turns parsed bodies into ValidRequests for one served model."""

    def __init__(self, *, model_name: str, tokenizer: ModelTokenizer) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound unless it is the served model."""
        if name != self._model_name:
            raise ModelNotFound(f"the model '{name[:128]}' does not exist", param="model", code="model_not_found")

    async def completions(
        self,
        body: CompletionRequest,
        request_id: RequestId,
        limit_tokens: int,
        context: RequestContext = NO_CONTEXT,
        prompts_max: int = PROMPTS_MAX,
    ) -> list[ValidRequest]:
        """One request for each prompt of the body, in order; the ids of all but the first have a number behind them."""
        self._check_common(body)
        if body.max_tokens == 0 and not body.echo:
            raise InvalidRequest(
                "'max_tokens' is 0, which is only allowed with 'echo': true", param="max_tokens", code="invalid_value"
            )
        prompts = _prompts(body.prompt)
        prompts_max = min(prompts_max, PROMPTS_MAX)
        if len(prompts) > prompts_max:
            raise InvalidRequest(
                f"'prompt' has {len(prompts)} entries, at most {prompts_max} are taken", param="prompt", code="invalid_value"
            )
        if len(prompts) > 1 and body.timeline:
            raise InvalidRequest("'timeline' is for a single prompt", param="timeline", code="invalid_value")
        requests = []
        for index, prompt in enumerate(prompts):
            own_id = request_id if index == 0 else RequestId(f"{request_id}-{index}")
            requests.append(await self._completion(body, prompt, own_id, limit_tokens, context))
        return requests

    async def _completion(
        self, body: CompletionRequest, prompt: Any, request_id: RequestId, limit_tokens: int, context: RequestContext
    ) -> ValidRequest:
        token_ids = await self._completion_prompt(prompt)
        has_max_tokens = "max_tokens" in body.model_fields_set
        max_tokens = body.max_tokens if has_max_tokens else COMPLETION_MAX_TOKENS_DEFAULT
        if not has_max_tokens and token_ids:  # a default must not refuse a prompt that fits
            max_tokens = max(1, min(COMPLETION_MAX_TOKENS_DEFAULT, limit_tokens - len(token_ids)))
        return self._build(
            body,
            Endpoint.COMPLETION,
            request_id,
            token_ids,
            "prompt",
            max_tokens,
            "max_tokens",
            limit_tokens,
            body.logprobs,
            context,
            echoes_prompt=bool(body.echo),
        )

    async def chat(
        self, body: ChatCompletionRequest, request_id: RequestId, limit_tokens: int, context: RequestContext = NO_CONTEXT
    ) -> ValidRequest:
        self._check_common(body)
        if (
            body.max_tokens is not None
            and body.max_completion_tokens is not None
            and body.max_tokens != body.max_completion_tokens
        ):
            raise InvalidRequest(
                "'max_tokens' and 'max_completion_tokens' differ; give one", param="max_completion_tokens", code="invalid_value"
            )
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest(
                "'top_logprobs' is only allowed with 'logprobs': true", param="top_logprobs", code="invalid_value"
            )
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        token_ids = await self.chat_prompt(body.messages)
        return self._build(
            body, Endpoint.CHAT, request_id, token_ids, "messages", max_tokens, param, limit_tokens, num_logprobs, context
        )

    async def chat_prompt(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation through the model's chat template. The template writes the BOS itself."""
        template = self._tokenizer.chat_template
        if template is None:
            raise InvalidRequest(f"the model '{self._model_name}' has no chat template; use /v1/completions", param="messages")
        plain = [_plain_message(i, message) for i, message in enumerate(messages)]
        text = template.render(plain, add_generation_prompt=add_generation_prompt)
        return await self._tokenizer.encode(text, add_special_tokens=False)

    def _check_common(self, body: GenerationRequest) -> None:
        self.check_model(body.model)
        if body.n is not None and body.n != 1:
            raise InvalidRequest(
                f"'n' must be 1, this server returns one choice per request (got {body.n})",
                param="n",
                code="unsupported_parameter",
            )
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest(
                "'stream_options' is only allowed with 'stream': true", param="stream_options", code="invalid_value"
            )
        if body.max_tokens is not None and body.min_tokens is not None and body.min_tokens > body.max_tokens:
            raise InvalidRequest(
                f"'min_tokens' ({body.min_tokens}) is greater than 'max_tokens' ({body.max_tokens})",
                param="min_tokens",
                code="invalid_value",
            )
        for token_id in body.stop_token_ids or ():
            self._check_token_id(token_id, "stop_token_ids")

    async def _completion_prompt(self, prompt: Any) -> list[int]:
        """A text or token ids."""
        if isinstance(prompt, str):
            return await self._tokenizer.encode(encodable(prompt, "prompt"), add_special_tokens=True)
        if not isinstance(prompt, list):
            raise InvalidRequest(
                f"'prompt' must be a string or a list of token ids, not {_json_type(prompt)}",
                param="prompt",
                code="invalid_value",
            )
        for token_id in prompt:
            if type(token_id) is not int:
                raise InvalidRequest(
                    f"'prompt' must hold token ids only, not {_json_type(token_id)}", param="prompt", code="invalid_value"
                )
            self._check_token_id(token_id, "prompt")
        return prompt

    def _check_token_id(self, token_id: int, param: str) -> None:
        if not 0 <= token_id < self._tokenizer.vocab_size:
            raise InvalidRequest(
                f"'{param}': token id {token_id} is outside the vocabulary of {self._tokenizer.vocab_size}",
                param=param,
                code="invalid_value",
            )

    def _logit_bias(self, body: GenerationRequest) -> tuple[tuple[int, float], ...]:
        """Ascending token ids and what is added to their logits. JSON has no integer keys: they come as decimal text."""
        bias = []
        for key, value in (body.logit_bias or {}).items():
            if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
                raise InvalidRequest(
                    f"'logit_bias': keys must be token ids, not {key[:64]!r}", param="logit_bias", code="invalid_value"
                )
            self._check_token_id(int(key), "logit_bias")
            bias.append((int(key), value))
        return tuple(sorted(bias))

    def _build(
        self,
        body: GenerationRequest,
        endpoint: Endpoint,
        request_id: RequestId,
        token_ids: list[int],
        prompt_param: str,
        max_tokens: int | None,
        max_tokens_param: str,
        limit_tokens: int,
        num_logprobs: int | None,
        context: RequestContext,
        *,
        echoes_prompt: bool = False,
    ) -> ValidRequest:
        if not token_ids:
            raise InvalidRequest(f"'{prompt_param}' is empty: it has no tokens", param=prompt_param, code="empty_prompt")
        num_left = limit_tokens - len(token_ids)
        if num_left < 1:
            raise InvalidRequest(
                f"'{prompt_param}' has {len(token_ids)} tokens; with at least one completion token the limit is {limit_tokens}",
                param=prompt_param,
                code="context_length_exceeded",
            )
        if max_tokens is not None and max_tokens > num_left:
            raise InvalidRequest(
                f"'{max_tokens_param}' is {max_tokens}, but the prompt has {len(token_ids)} tokens "
                f"and the limit for both is {limit_tokens}",
                param=max_tokens_param,
                code="context_length_exceeded",
            )
        max_new_tokens = num_left if max_tokens is None else max(1, max_tokens)
        ignore_eos = bool(body.ignore_eos)
        stop_ids = {*(body.stop_token_ids or ()), *(() if ignore_eos else self._tokenizer.eos_token_ids)}
        return ValidRequest(
            request_id=request_id,
            endpoint=endpoint,
            model=self._model_name,
            prompt_token_ids=tuple(token_ids),
            sampling=_sampling(body, self._logit_bias(body)),
            stop=StopConditions(
                max_new_tokens=max_new_tokens,
                min_new_tokens=min(body.min_tokens or 0, max_new_tokens),
                stop_token_ids=tuple(sorted(stop_ids)),
                ignore_eos=ignore_eos,
            ),
            stop_strings=_stop_strings(body.stop),
            num_logprobs=num_logprobs,
            echoes_prompt=echoes_prompt,
            has_completion=max_tokens != 0,
            stream=bool(body.stream),
            include_usage=bool(body.stream_options is not None and body.stream_options.include_usage),
            wants_timeline=bool(body.timeline),
            context=context,
        )


def _prompts(prompt: Any) -> list[Any]:
    """The prompts of a body: a text or a list of token ids is one, a list of these is several."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt
    return [prompt]


def encodable(text: str, param: str) -> str:
    """The text, or InvalidRequest for lone surrogates, which JSON can carry but no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"'{param}' contains a lone surrogate at character {error.start}", param=param, code="invalid_value"
        ) from error
    return text


def _sampling(body: GenerationRequest, logit_bias: tuple[tuple[int, float], ...]) -> SamplingParams:
    """OpenAI's defaults; a seed is drawn here when the client gave none, so that every attempt samples the same tokens."""
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=logit_bias,
    )


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    for text in stops:
        if not text or len(text) > STOP_CHARS_MAX:
            raise InvalidRequest(
                f"'stop': a stop string must have 1 to {STOP_CHARS_MAX} characters, not {len(text)}",
                param="stop",
                code="invalid_value",
            )
        encodable(text, "stop")
    return tuple(dict.fromkeys(stops))


def _plain_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """What templates are written for: a role and one string. `developer` is OpenAI's newer name of `system`."""
    content = message.content if isinstance(message.content, str) else "".join(part.text for part in message.content)
    plain = {
        "role": "system" if message.role == "developer" else message.role,
        "content": encodable(content, f"messages.{index}.content"),
    }
    if message.name is not None:
        plain["name"] = encodable(message.name, f"messages.{index}.name")
    return plain


def _location(parts: Sequence[int | str]) -> str:
    """`messages.0.content` from pydantic's path, without the names of union members."""
    return (
        ".".join(
            str(part)
            for part in parts
            if isinstance(part, int) or part.isidentifier() and part not in ("str", "int", "list", "TextPart")
        )
        or "body"
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _json_type(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)
