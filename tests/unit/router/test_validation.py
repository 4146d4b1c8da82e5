"""Everything a client can get wrong is refused with the field named; everything neutral is accepted; nothing is ignored."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import BatonError, InvalidRequest, ModelNotFound
from common.ids import RequestId
from router.api_models import UNSUPPORTED_PARAMETERS, ChatCompletionRequest, CompletionRequest
from router.request import ValidRequest
from router.validation import Validator, parse_generation, parse_json
from tests.unit.router.tiny_tokenizer import EOS_ID, ids_of, make_tokenizer

LIMIT = 100
TOKENIZER = make_tokenizer()


async def chat(**fields: Any) -> ValidRequest:
    raw = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    body = parse_generation(ChatCompletionRequest, parse_json(json.dumps(raw).encode()))
    return await Validator(model_name="m", tokenizer=TOKENIZER).chat(body, RequestId("r"), LIMIT)


async def complete(**fields: Any) -> ValidRequest:
    raw = {"model": "m", "prompt": "hi", **fields}
    body = parse_generation(CompletionRequest, parse_json(json.dumps(raw).encode()))
    (request,) = await Validator(model_name="m", tokenizer=TOKENIZER).completions(body, RequestId("r"), LIMIT)
    return request


BAD_VALUES: list[tuple[str, Any]] = [
    *[("temperature", v) for v in (-0.1, 2.1, 1e308, "1", True, [], {})],
    *[("top_p", v) for v in (0, -1, 1.01, "x", False)],
    *[("top_k", v) for v in (-2, 1.5, True, 10**12)],
    *[("min_p", v) for v in (-0.1, 1.1, "0")],
    *[("seed", v) for v in (1.5, "1", 2**64, -(2**63) - 1, True)],
    *[("max_tokens", v) for v in (0, -1, 1.0, "5", True, 2**40)],
    *[("min_tokens", v) for v in (-1, "1")],
    *[("n", v) for v in (0, 2, -1, 10**6, "1", True)],
    *[("stop", v) for v in ("", [""], ["a"] * 5, 5, [1], [None], {"a": 1}, "x" * 2000)],
    *[("stop_token_ids", v) for v in ([-1], [10**6], ["a"], 5, [True])],
    *[("stream", v) for v in ("true", 1)],
    *[("stream_options", v) for v in ({"include_usage": True}, [], "x")],
    *[("ignore_eos", v) for v in (1, "no")],
    *[("timeline", v) for v in (1, "yes")],
    *[("user", v) for v in (5, ["a"])],
    *[("logprobs", v) for v in ("yes", -1, 21, 1.5, [])],
    *[("top_logprobs", v) for v in (5, -1, 21, "1", True)],
    *[
        ("logit_bias", v)
        for v in ({"1": 101}, {"1": -100.5}, {"1": "x"}, {"1": True}, {"a": 1}, {"-1": 1}, {"01": 1}, {"1.0": 1})
    ],
    *[("logit_bias", v) for v in ({"100000": 1}, {"9" * 40: 1}, {"\u0661": 1}, [], 5, {str(i): 0 for i in range(1025)})],
    *[("frequency_penalty", v) for v in (2.5, -2.01, "0", False)],
    *[("presence_penalty", v) for v in (3, [], True)],
    *[("repetition_penalty", v) for v in (0, -1, 10.5, "1")],
    *[("best_of", v) for v in (2, 0)],
    *[("suffix", v) for v in ("x",)],
    *[("tools", v) for v in ([{"type": "function"}],)],
    *[("response_format", v) for v in ({"type": "json_object"},)],
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=lambda v: json.dumps(v)[:30])
@pytest.mark.parametrize("call", [chat, complete])
async def test_bad_value_is_refused_by_name(call: Any, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await call(**{name: value})
    assert refused.value.param is not None and refused.value.param.split(".")[0] == name
    assert name in refused.value.message


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_PARAMETERS))
async def test_unsupported_parameters_accept_null_and_neutral_values_only(name: str) -> None:
    for value in (None, *UNSUPPORTED_PARAMETERS[name]):
        await chat(**{name: value})
        await complete(**{name: value})
    with pytest.raises(InvalidRequest, match=f"'{name}' is not supported"):
        await chat(**{name: {"something": "else"}})


async def test_null_means_default_for_every_optional_parameter() -> None:
    optional = set(ChatCompletionRequest.model_fields) - {"model", "messages"}
    request = await chat(**dict.fromkeys(optional))
    assert request.sampling.temperature == 1.0 and request.sampling.top_p == 1.0 and request.sampling.top_k == 0
    assert request.stop.max_new_tokens == LIMIT - request.num_prompt_tokens
    assert request.stop.stop_token_ids == (EOS_ID,) and not request.stream


async def test_penalties_and_bias_reach_the_sampling_parameters() -> None:
    for call in (chat, complete):
        fields = {
            "presence_penalty": 1,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.25,
            "logit_bias": {"30": 2, "4": -100},
        }
        sampling = (await call(**fields)).sampling
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -0.5, 1.25)
        assert sampling.logit_bias == ((4, -100.0), (30, 2.0))
        plain = (await call()).sampling
        assert not plain.has_penalties and plain.logit_bias == ()


async def test_echo_is_for_completions_and_allows_no_completion_at_all() -> None:
    request = await complete(echo=True, max_tokens=0, logprobs=1)
    assert request.echoes_prompt and not request.has_completion and request.num_prompt_logprobs == 1
    assert request.stop.max_new_tokens == 1, "one token is computed all the same"
    assert (await complete(echo=True, max_tokens=5)).has_completion and (await complete(echo=True)).num_prompt_logprobs is None
    plain = await complete(logprobs=3)
    assert not plain.echoes_prompt and plain.num_prompt_logprobs is None and plain.has_completion
    with pytest.raises(InvalidRequest, match="'max_tokens' is 0, which is only allowed with 'echo'"):
        await complete(max_tokens=0, echo=False)
    for value in (1, "yes", []):
        with pytest.raises(InvalidRequest, match="echo"):
            await complete(echo=value)
    with pytest.raises(InvalidRequest, match="echo"):
        await chat(echo=True)


async def test_logprobs_are_a_number_for_completions_and_a_switch_with_a_number_for_chats() -> None:
    assert (await complete()).num_logprobs is None and (await complete(logprobs=0)).num_logprobs == 0
    assert (await complete(logprobs=20)).num_logprobs == 20
    assert (await chat(logprobs=False)).num_logprobs is None and (await chat(logprobs=True)).num_logprobs == 0
    assert (await chat(logprobs=True, top_logprobs=7)).num_logprobs == 7
    with pytest.raises(InvalidRequest, match="'top_logprobs' is only allowed with 'logprobs': true"):
        await chat(top_logprobs=1)
    with pytest.raises(InvalidRequest, match="logprobs"):
        await complete(logprobs=True)
    with pytest.raises(InvalidRequest, match="logprobs"):
        await chat(logprobs=3)


async def test_unknown_fields_are_all_named() -> None:
    with pytest.raises(InvalidRequest, match="unknown fields: 'foo', 'bar'") as refused:
        await chat(foo=1, bar=None)
    assert refused.value.param == "foo"
    with pytest.raises(InvalidRequest, match=r"unknown field: 'messages.0.tool'"):
        await chat(messages=[{"role": "user", "content": "x", "tool": 1}])


BAD_MESSAGES: list[Any] = [
    None, [], "hi", [1], [{}], [{"role": "user"}], [{"role": "user", "content": None}], [{"role": "wizard", "content": "x"}],
    [{"role": "tool", "content": "x"}], [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], [{"role": "user", "content": "\ud800"}],
    [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
]  # fmt: skip


@pytest.mark.parametrize("messages", BAD_MESSAGES, ids=lambda v: json.dumps(v)[:40])
async def test_bad_messages_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await chat(messages=messages)
    assert refused.value.param is not None and refused.value.param.startswith("messages")


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        None,
        5,
        True,
        {"a": 1},
        ["a", ""],
        [[1], []],
        [1.5],
        [1, "a"],
        [True],
        [-1],
        [10**9],
        ["a", 1],
        "\ud800",
    ],
    ids=lambda v: json.dumps(v)[:30],
)
async def test_bad_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await complete(prompt=prompt)
    assert refused.value.param == "prompt"


async def test_prompt_forms_give_the_same_tokens() -> None:
    ids = ids_of("hey")
    for prompt in ("hey", ["hey"], ids, [ids]):
        assert (await complete(prompt=prompt)).prompt_token_ids == tuple(ids)


async def test_content_parts_are_joined_and_developer_is_system() -> None:
    parts = await chat(
        messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    )
    plain = await chat(messages=[{"role": "system", "content": "ab"}])
    assert parts.prompt_token_ids == plain.prompt_token_ids


async def test_limits_are_named_in_the_message() -> None:
    assert (await complete(prompt=[65] * 99, max_tokens=1)).stop.max_new_tokens == 1
    for num_tokens in (100, 101, 116):
        with pytest.raises(InvalidRequest, match=f"has {num_tokens} tokens.*limit is {LIMIT}") as refused:
            await complete(prompt=[65] * num_tokens)
        assert refused.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequest, match="'max_tokens' is 51"):
        await complete(prompt=[65] * 50, max_tokens=51)
    with pytest.raises(InvalidRequest, match="'max_completion_tokens' is 99"):
        await chat(max_completion_tokens=99)


async def test_max_tokens_defaults() -> None:
    assert (await complete()).stop.max_new_tokens == 16
    assert (await complete(max_tokens=None)).stop.max_new_tokens == LIMIT - 2
    assert (await complete(prompt=[65] * 95)).stop.max_new_tokens == 5
    assert (await chat(max_tokens=7)).stop.max_new_tokens == (await chat(max_completion_tokens=7)).stop.max_new_tokens == 7
    with pytest.raises(InvalidRequest, match="differ"):
        await chat(max_tokens=7, max_completion_tokens=8)


async def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'min_tokens'"):
        await chat(max_tokens=2, min_tokens=3)


async def test_stop_tokens_include_eos_unless_ignored() -> None:
    assert (await chat(stop_token_ids=[65])).stop.stop_token_ids == (65, EOS_ID)
    assert (await chat(stop_token_ids=[65], ignore_eos=True)).stop.stop_token_ids == (65,)


async def test_seed_is_kept_or_drawn() -> None:
    assert (await chat(seed=5)).sampling.seed == 5
    assert (await chat(seed=-1)).sampling.seed == 2**64 - 1
    assert (await chat()).sampling.seed != (await chat()).sampling.seed


async def test_unknown_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound) as refused:
        await chat(model="other")
    assert refused.value.param == "model"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"x"',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda b: repr(b[:12]),
)
def test_bodies_that_are_not_json_objects_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_json(body)
    assert refused.value.code == "invalid_json"


async def test_a_long_text_is_tokenised_without_stopping_the_event_loop() -> None:
    text = "word " * 200_000
    gaps: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    ticking = asyncio.create_task(tick())
    started = time.monotonic()
    ids = await TOKENIZER.encode(text, add_special_tokens=True)
    elapsed = time.monotonic() - started
    ticking.cancel()
    assert len(ids) == len(text) and max(gaps) < max(0.2, elapsed / 2)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(
    sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *UNSUPPORTED_PARAMETERS, "else"})
)


@given(st.dictionaries(NAMES, JSON, max_size=3), st.sampled_from([chat, complete]))
async def test_any_json_is_accepted_or_refused_as_the_clients_mistake(fields: dict[str, Any], call: Any) -> None:
    try:
        request = await call(**fields)
    except BatonError as error:
        assert error.rule.http_status in (400, 404)
    else:
        assert request.prompt_token_ids and request.num_tokens_max <= LIMIT
