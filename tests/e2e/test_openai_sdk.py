"""The real OpenAI client against the real fleet: it must parse every chunk, and what it reads must be what was generated."""

from __future__ import annotations

import openai
import pytest

from tests.harness import Fleet

MESSAGES = [
    {"role": "system", "content": "You answer questions about the world in one short sentence and never in more than that."},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture
def client(disaggregated: Fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{disaggregated.url}/v1", api_key="unused", max_retries=0, timeout=60)


def test_streamed_chat_is_parsed_whole_and_equals_the_unstreamed_answer(client: openai.OpenAI) -> None:
    common = {"model": "smollm2-135m", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**common)  # type: ignore[call-overload]
    pieces, finish_reasons, usages = [], [], []
    with client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}) as stream:  # type: ignore[call-overload]
        for chunk in stream:
            assert chunk.id.startswith("chatcmpl-")
            assert chunk.object == "chat.completion.chunk"
            usages += [chunk.usage] if chunk.usage is not None else []
            for choice in chunk.choices:
                pieces.append(choice.delta.content or "")
                finish_reasons += [choice.finish_reason] if choice.finish_reason else []
    assert "".join(pieces) == whole.choices[0].message.content
    assert "Paris" in "".join(pieces)
    assert finish_reasons == [whole.choices[0].finish_reason] == ["stop"]
    assert len(pieces) > 3, "the answer did not come in pieces"
    [usage] = usages
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smollm2-135m", messages=MESSAGES, temperature=-1)  # type: ignore[arg-type]
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)  # type: ignore[arg-type]


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2-135m"]
