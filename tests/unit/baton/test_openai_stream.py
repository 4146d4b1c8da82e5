"""Reading the event stream of any OpenAI-compatible server, and the conversation built on it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from baton.chat import Conversation, first_model
from baton.openai_stream import StreamFailed, base_url, failure_of, failure_of_body, is_done, parse_event, request_body
from baton.self_check import run_self_check
from tests.unit.baton.fake_openai import FakeOpenAI


def test_pieces_finish_and_usage_are_read_from_both_shapes() -> None:
    chat = parse_event('data: {"choices":[{"delta":{"content":"hi"},"finish_reason":null}]}', "chat")
    assert chat is not None and chat.text == "hi" and chat.finish_reason is None and chat.usage is None
    plain = parse_event('data: {"choices":[{"text":"hi","finish_reason":"stop"}]}', "completions")
    assert plain is not None and plain.text == "hi" and plain.finish_reason == "stop"
    usage = '{"prompt_tokens":3,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}'
    end = parse_event(f'data: {{"choices":[],"usage":{usage},"baton":{{"a":1}}}}', "chat")
    assert end is not None and end.usage is not None and end.raw["baton"] == {"a": 1}
    assert (end.usage.num_prompt_tokens, end.usage.num_completion_tokens, end.usage.num_cached_tokens) == (3, 4, 2)


@pytest.mark.parametrize("line", ["", ": keep-alive", "event: x", "data:", "data: [DONE]", "id: 3"])
def test_lines_without_a_chunk_are_skipped(line: str) -> None:
    assert parse_event(line, "chat") is None
    assert is_done(line) == (line == "data: [DONE]")


@pytest.mark.parametrize("delta", ['{"role":"assistant"}', "null", '{"content":null}', '{"content":5}'])
def test_a_delta_without_text_is_an_empty_piece(delta: str) -> None:
    chunk = parse_event(f'data: {{"choices":[{{"delta":{delta}}}]}}', "chat")
    assert chunk is not None and chunk.text == ""


@pytest.mark.parametrize("data", ["{", "[]", "3", '"x"'])
def test_data_that_is_no_object_is_a_failure(data: str) -> None:
    with pytest.raises(StreamFailed, match="invalid_stream"):
        parse_event(f"data: {data}", "chat")


def test_an_error_event_is_a_failure_of_its_kind() -> None:
    with pytest.raises(StreamFailed, match="overloaded_error: too much"):
        parse_event('data: {"error":{"type":"overloaded_error","message":"too much"}}', "chat")


def test_error_bodies_of_any_shape_are_readable() -> None:
    assert failure_of_body(b'{"error":{"type":"t","message":"m"}}', 429).kind == "HTTP 429 t"
    assert failure_of_body(b"<html>", 502).kind == "HTTP 502"
    assert failure_of({"detail": "x"}, 404).kind == "HTTP 404"
    assert "plain words" in str(failure_of({"error": "plain words"}, 500))


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_both_spellings_of_a_base_url_work(url: str) -> None:
    assert base_url(url) == "http://h:1"


def test_the_body_asks_for_a_stream_with_usage() -> None:
    body = request_body("chat", "m", "hello", 5, temperature=0.0)
    assert body["messages"] == [{"role": "user", "content": "hello"}] and body["stream"] is True
    assert body["stream_options"] == {"include_usage": True} and body["max_tokens"] == 5 and body["temperature"] == 0.0
    assert request_body("completions", "m", "hello", 5)["prompt"] == "hello"


async def test_a_conversation_remembers_both_sides_until_it_is_reset() -> None:
    async with FakeOpenAI(pieces=["Good", " day"]) as server:
        shown: list[str] = []

        def talk() -> None:
            with httpx.Client(trust_env=False) as client:
                chat = Conversation(client, server.url, first_model(client, server.url), system="Be brief.")
                note = chat.ask("Hello", shown.append)
                assert "2 tokens" in note
                chat.ask("And now?", shown.append)
                chat.reset()
                chat.ask("Anew", shown.append)

        await asyncio.to_thread(talk)
    assert shown == ["Good", " day"] * 3
    first, second, third = (body["messages"] for body in server.bodies)
    assert server.bodies[0]["model"] == "fake"
    assert first == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert second[1:] == [*first[1:], {"role": "assistant", "content": "Good day"}, {"role": "user", "content": "And now?"}]
    assert third == [first[0], {"role": "user", "content": "Anew"}]


async def test_ctrl_c_stops_the_answer_and_keeps_what_was_said() -> None:
    async with FakeOpenAI(pieces=["a", "b", *["c"] * 200], gap_s=0.02) as server:

        def talk() -> Conversation:
            with httpx.Client(trust_env=False) as client:
                chat = Conversation(client, server.url, "fake")

                def interrupt(piece: str) -> None:
                    if piece == "b":
                        raise KeyboardInterrupt

                assert chat.ask("Hello", interrupt) == "stopped"
                return chat

        chat = await asyncio.to_thread(talk)
        await asyncio.wait_for(server.idle.wait(), 10)
    assert chat.messages == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "ab"}]


async def test_a_refused_question_leaves_the_history_as_it_was() -> None:
    async with FakeOpenAI(failures={0: "refuse"}) as server:

        def talk() -> Conversation:
            with httpx.Client(trust_env=False) as client:
                chat = Conversation(client, server.url, "fake")
                with pytest.raises(StreamFailed, match="too much"):
                    chat.ask("Hello", lambda piece: None)
                return chat

        assert (await asyncio.to_thread(talk)).messages == []


async def test_the_self_check_returns_text_usage_and_timeline() -> None:
    pieces: list[str] = []
    async with FakeOpenAI(pieces=["A", " relay"], extra={"baton": {"transport": "ucx"}}, gap_s=0.01) as server:
        result = await run_self_check(server.url, "fake", pieces.append)
    assert pieces == ["A", " relay"] and result.text == "A relay"
    assert result.timeline == {"transport": "ucx"} and result.usage.num_completion_tokens == 2
    assert 0 < result.first_text_s < result.last_text_s and result.tokens_per_s > 0
    assert server.bodies[0]["timeline"] is True


@pytest.mark.parametrize("failure", ["refuse", "cut", "error event"])
async def test_a_self_check_that_is_not_answered_in_full_fails(failure: str) -> None:
    async with FakeOpenAI(failures={0: failure}) as server:
        with pytest.raises(StreamFailed):
            await run_self_check(server.url, "fake", lambda text: None)


async def test_a_self_check_without_any_text_fails() -> None:
    async with FakeOpenAI(pieces=[]) as server:
        with pytest.raises(StreamFailed, match="incomplete"):
            await run_self_check(server.url, "fake", lambda text: None)
