"""Requests through a real router, real HTTP and real gRPC, to scripted workers: the answers and their shapes."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from common.types import Role
from tests.fakes.router_harness import Harness, running_router, sse_events
from tests.fakes.worker import completion_tokens, fake_logprob, hash_token
from tests.unit.router.tiny_tokenizer import EOS_ID, ids_of, make_tokenizer

PROMPT = "a prompt that is long enough for both legs"
CHAT = [{"role": "user", "content": PROMPT}]
LETTERS = ids_of("abcdefghijklmnopqrstuvwxyz")


def expected_text(num_tokens: int, seed: int, prompt: str = PROMPT) -> str:
    return make_tokenizer().decode(completion_tokens(ids_of(prompt), num_tokens, seed))


async def complete(harness: Harness, **fields: Any) -> dict[str, Any]:
    response = await harness.client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "seed": 1, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(harness: Harness, path: str = "/v1/completions", **fields: Any) -> list[Any]:
    body = {
        "model": "tiny",
        "seed": 1,
        "stream": True,
        **({"prompt": PROMPT} if path == "/v1/completions" else {"messages": CHAT}),
        **fields,
    }
    async with harness.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [event async for event in sse_events(response)]


async def test_disaggregated_completion_has_prefills_token_and_decodes_tokens() -> None:
    async with running_router() as harness:
        body = await complete(harness, max_tokens=12, timeline=True)
        assert body["choices"][0]["text"] == expected_text(12, 1)
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"] == {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": 12,
            "total_tokens": len(PROMPT) + 12,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        assert harness.prefill[0].count("prefill") == 1 and harness.decode[0].count("reserve") == 1
        baton = body["baton"]
        assert (baton["mode"], baton["prefill_worker"], baton["decode_worker"], baton["transport"]) == (
            "disaggregated",
            "p0",
            "d0",
            "tcp",
        )
        assert baton["handoff"]["num_bytes"] == 8192
        assert sum(baton["stages"].values()) == pytest.approx(baton["ttft_s"], abs=1e-5)


async def test_stream_equals_the_whole_response_and_usage_comes_only_when_asked() -> None:
    async with running_router() as harness:
        events = await stream(harness, max_tokens=12)
        assert events[-1] == "[DONE]" and all("usage" not in event for event in events[:-1])
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == expected_text(12, 1)
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 2) + ["length"]

        events = await stream(harness, max_tokens=12, stream_options={"include_usage": True})
        assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 12
        assert all(event["usage"] is None for event in events[:-2])
        assert {event["id"] for event in events[:-1]} == {events[0]["id"]}


def letter(known: list[int], seed: int) -> int:
    """Like the usual fake token, but always one character by itself."""
    return LETTERS[hash_token(known, seed) % len(LETTERS)]


def letters(num_tokens: int) -> str:
    return make_tokenizer().decode(completion_tokens(ids_of(PROMPT), num_tokens, 1, letter))


async def test_completion_logprobs_come_once_per_token_streamed_and_whole() -> None:
    async with running_router(next_token=letter) as harness:
        whole = (await complete(harness, max_tokens=12, logprobs=2))["choices"][0]["logprobs"]
        text = letters(12)
        assert whole["tokens"] == list(text) and whole["text_offset"] == list(range(12))
        assert whole["token_logprobs"] == [fake_logprob(index) for index in range(12)]
        for index, top in enumerate(whole["top_logprobs"]):
            other = make_tokenizer().token_text(ids_of(text[index])[0] + 1)
            assert top == {text[index]: fake_logprob(index), other: fake_logprob(index) - 1}
        events = await stream(harness, max_tokens=12, logprobs=2)
        pieces = [event["choices"][0]["logprobs"] for event in events[:-1] if event["choices"][0]["logprobs"]]
        assert {name: sum((piece[name] for piece in pieces), []) for name in whole} == whole
        only_tokens = (await complete(harness, max_tokens=2, logprobs=0))["choices"][0]["logprobs"]
        assert only_tokens["top_logprobs"] == [{text[0]: fake_logprob(0)}, {text[1]: fake_logprob(1)}]
        assert (await complete(harness, max_tokens=2))["choices"][0]["logprobs"] is None


async def test_chat_logprobs_name_tokens_with_their_bytes_and_the_first_one_comes_from_prefill() -> None:
    async with running_router(next_token=letter) as harness:
        fields = {"messages": CHAT, "model": "tiny", "seed": 1, "max_tokens": 6, "logprobs": True, "top_logprobs": 1}
        response = await harness.client.post("/v1/chat/completions", json=fields)
        choice = response.json()["choices"][0]
        content = choice["logprobs"]["content"]
        assert "".join(token["token"] for token in content) == choice["message"]["content"] and len(content) == 6
        assert [token["logprob"] for token in content] == [fake_logprob(index) for index in range(6)]
        assert all(token["bytes"] == list(token["token"].encode()) for token in content)
        assert [token["top_logprobs"][0]["logprob"] for token in content] == [fake_logprob(index) for index in range(6)]
        events = await stream(harness, "/v1/chat/completions", max_tokens=6, logprobs=True, top_logprobs=1)
        pieces = [event["choices"][0]["logprobs"] for event in events[:-1]]
        assert sum((piece["content"] for piece in pieces if piece), []) == content


async def test_logprobs_of_text_that_a_stop_string_holds_back_are_not_lost() -> None:
    async with running_router(next_token=letter) as harness:
        text = letters(12)
        stop = text[6:9]
        whole = (await complete(harness, max_tokens=12, logprobs=0, stop=stop))["choices"][0]
        assert whole["text"] == text[:6] and whole["finish_reason"] == "stop"
        assert whole["logprobs"]["tokens"] == list(text[:9]), (
            "one entry for each completion token, those of the stop string included"
        )
        events = await stream(harness, max_tokens=12, logprobs=0, stop=stop)
        pieces = [event["choices"][0]["logprobs"] for event in events[:-1]]
        assert sum((piece["tokens"] for piece in pieces if piece), []) == list(text[:9])
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text[:6]


MANY = [PROMPT, "another prompt, which is longer than the first one", ids_of(PROMPT), "short"]


def texts_of_many(num_tokens: int) -> list[str]:
    prompts = [ids_of(prompt) if isinstance(prompt, str) else prompt for prompt in MANY]
    return [make_tokenizer().decode(completion_tokens(prompt, num_tokens, 1, letter)) for prompt in prompts]


async def test_several_prompts_are_answered_as_if_each_had_come_alone() -> None:
    async with running_router(next_token=letter) as harness:
        body = await complete(harness, prompt=MANY, max_tokens=6, logprobs=0)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in body["choices"]] == texts_of_many(6)
        assert ["".join(choice["logprobs"]["tokens"]) for choice in body["choices"]] == texts_of_many(6)
        assert body["usage"]["completion_tokens"] == 24
        assert body["usage"]["prompt_tokens"] == sum(len(prompt) for prompt in MANY)
        alone = [(await complete(harness, prompt=prompt, max_tokens=6))["choices"][0]["text"] for prompt in MANY]
        assert alone == texts_of_many(6)
        ids = [line["request"] for line in harness.log_lines("request")][:4]
        assert sorted(ids) == [body["id"], *(f"{body['id']}-{index}" for index in (1, 2, 3))]


async def test_several_prompts_stream_side_by_side_and_end_once_each() -> None:
    async with running_router(next_token=letter) as harness:
        harness.decode[0].script.token_delay_s = 0.005
        events = await stream(harness, prompt=MANY, max_tokens=6, stream_options={"include_usage": True})
        assert events[-1] == "[DONE]" and events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 24
        texts, reasons = {index: "" for index in range(4)}, []
        for event in events[:-2]:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
            reasons += [(choice["index"], choice["finish_reason"])] if choice["finish_reason"] else []
        assert list(texts.values()) == texts_of_many(6)
        assert sorted(reasons) == [(index, "length") for index in range(4)]
        order = [event["choices"][0]["index"] for event in events[:-2]]
        assert order != sorted(order), "one after the other, not side by side"


async def test_one_prompt_that_fails_ends_all_and_leaves_nothing() -> None:
    async with running_router(next_token=letter) as harness:
        harness.decode[0].script.fail_kind_at = ("Internal", 3)
        response = await harness.client.post(
            "/v1/completions", json={"model": "tiny", "prompt": MANY, "seed": 1, "max_tokens": 6}
        )
        assert response.status_code == 500 and response.json()["error"]["kind"] == "Internal"
        await harness.until(lambda: harness.router.orchestrator.num_active == 0)


async def test_bad_lists_of_prompts_are_refused_by_name() -> None:
    async with running_router(settings={"requests_max": 3}) as harness:
        for prompt in (MANY, ["x"] * 65, [""], ["x", 5], ["x", []], [[1], "x", None], [[]], [True], [["x"]]):
            response = await harness.client.post("/v1/completions", json={"model": "tiny", "prompt": prompt})
            assert response.status_code == 400 and response.json()["error"]["param"] == "prompt", prompt
        response = await harness.client.post("/v1/completions", json={"model": "tiny", "prompt": ["x", "y"], "timeline": True})
        assert response.status_code == 400 and response.json()["error"]["param"] == "timeline"
        assert not any(worker.specs for worker in harness.workers)


async def test_echo_gives_the_prompt_back_with_its_logprobs() -> None:
    async with running_router(next_token=letter) as harness:
        choice = (await complete(harness, max_tokens=4, echo=True, logprobs=1))["choices"][0]
        assert choice["text"] == PROMPT + letters(4)
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == list(PROMPT + letters(4)) and logprobs["text_offset"] == list(range(len(PROMPT) + 4))
        expected = [None, *(fake_logprob(position) for position in range(1, len(PROMPT))), *map(fake_logprob, range(4))]
        assert logprobs["token_logprobs"] == expected
        assert logprobs["top_logprobs"][0] is None and logprobs["top_logprobs"][3] == {PROMPT[3]: fake_logprob(3)}
        assert harness.prefill[0].specs[0].prompt_logprobs == 1
        events = await stream(harness, max_tokens=4, echo=True, logprobs=1)
        pieces = [event["choices"][0]["logprobs"] for event in events[:-1] if event["choices"][0]["logprobs"]]
        assert {name: sum((piece[name] for piece in pieces), []) for name in logprobs} == logprobs
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == PROMPT + letters(4)
        plain = (await complete(harness, max_tokens=4, echo=True))["choices"][0]
        assert plain["text"] == PROMPT + letters(4) and plain["logprobs"] is None


@pytest.mark.parametrize("prompt", [PROMPT, ids_of(PROMPT)])
async def test_scoring_a_prompt_gives_no_token_and_never_touches_decode(prompt: Any) -> None:
    async with running_router(next_token=letter) as harness:
        body = await complete(harness, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
        text = prompt if isinstance(prompt, str) else PROMPT
        (choice,) = body["choices"]
        assert choice["text"] == text and choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"] == [None, *(fake_logprob(p) for p in range(1, len(text)))]
        assert body["usage"]["completion_tokens"] == 0 and body["usage"]["prompt_tokens"] == len(text)
        assert not harness.decode[0].specs


async def test_a_prompt_that_is_rated_again_after_a_failure_is_rated_once_in_the_answer() -> None:
    async with running_router(num_prefill=2, next_token=letter) as harness:
        for worker in harness.prefill:
            worker.script.fail_kind_at = ("HandoffFailed", 0)
            worker.script.refuse_kind, worker.script.refuse_times = "WorkerUnavailable", 1
            break
        choice = (await complete(harness, max_tokens=3, echo=True, logprobs=0))["choices"][0]
        assert choice["text"] == PROMPT + letters(3) and len(choice["logprobs"]["tokens"]) == len(PROMPT) + 3


async def test_logprobs_survive_the_death_of_a_decode_worker() -> None:
    async with running_router(num_decode=2, next_token=letter) as harness:
        for worker in harness.decode:
            worker.script.die_at = 5
            break
        whole = (await complete(harness, max_tokens=12, logprobs=1))["choices"][0]
        assert whole["logprobs"]["tokens"] == list(letters(12))
        assert whole["logprobs"]["token_logprobs"] == [fake_logprob(index) for index in range(12)]


async def test_chat_stream_starts_with_the_role() -> None:
    async with running_router() as harness:
        events = await stream(harness, "/v1/chat/completions", max_tokens=5, timeline=True)
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert events[0]["object"] == "chat.completion.chunk"
        assert events[-2]["choices"][0]["delta"] == {} and events[-2]["baton"]["attempts"] == 1
        assert len("".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])) == 5


async def test_short_prompt_runs_on_decode_alone() -> None:
    async with running_router() as harness:
        body = await complete(harness, prompt="abc", max_tokens=4, timeline=True)
        assert body["choices"][0]["text"] == expected_text(4, 1, "abc")
        assert harness.prefill[0].commands == [] and harness.decode[0].count("generate") == 1
        assert body["baton"]["mode"] == "local" and body["baton"]["transport"] == "none"
        assert harness.metric("baton_placements_total", mode="local", because="short_prompt") == 1


async def test_without_prefill_workers_decode_serves_everything() -> None:
    async with running_router(num_prefill=0) as harness:
        assert (await complete(harness, max_tokens=6))["choices"][0]["text"] == expected_text(6, 1)
        assert harness.metric("baton_placements_total", mode="local", because="no_prefill_worker") == 1


async def test_one_token_is_served_by_prefill_alone() -> None:
    async with running_router() as harness:
        body = await complete(harness, max_tokens=1)
        assert body["choices"][0]["text"] == expected_text(1, 1) and body["usage"]["completion_tokens"] == 1
        assert harness.decode[0].commands == []


async def test_eos_as_first_token_ends_both_legs() -> None:
    async with running_router(next_token=lambda known, seed: EOS_ID) as harness:
        body = await complete(harness, max_tokens=8)
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == (
            "",
            "stop",
            1,
        )
        await harness.decode[0].wait_for(lambda: harness.decode[0].count("abort") == 1)


async def test_stop_string_over_several_tokens_is_cut_and_the_legs_are_aborted() -> None:
    text = "some text, then STOP and never this"
    prompt = ids_of(PROMPT)
    script = [*prompt, *ids_of(text)]
    async with running_router(next_token=lambda known, seed: script[len(known)] if len(known) < len(script) else 65) as harness:
        for fields in ({"stop": "STOP"}, {"stop": ["zzz", "STOP", "this"]}):
            body = await complete(harness, max_tokens=200, **fields)
            assert body["choices"][0]["text"] == "some text, then " and body["choices"][0]["finish_reason"] == "stop"
            assert body["usage"]["completion_tokens"] == len("some text, then STOP")
        events = await stream(harness, max_tokens=200, stop="STOP")
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "some text, then "
        await harness.decode[0].wait_for(lambda: harness.decode[0].count("abort") == 3)
        assert harness.decode[0].num_running == 0


async def test_emoji_split_over_tokens_arrive_whole_in_every_chunk() -> None:
    text = "ok 👩🏽‍🚀 日本 é"
    script = [*ids_of(PROMPT), *ids_of(text), EOS_ID]
    async with running_router(next_token=lambda known, seed: script[len(known)]) as harness:
        pieces = [event["choices"][0]["text"] for event in (await stream(harness, max_tokens=100))[:-1]]
        assert "".join(pieces) == text and all("\ufffd" not in piece for piece in pieces)
        assert (await complete(harness, max_tokens=100))["choices"][0]["text"] == text


async def test_errors_have_openais_shape_everywhere() -> None:
    async with running_router() as harness:
        client = harness.client
        json_type = {"content-type": "application/json"}
        cases = [
            (await client.post("/v1/completions", content=b"{", headers=json_type), 400, None),
            (await client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}), 400, None),
            (await client.post("/v1/completions", json={"model": "other", "prompt": "x"}), 404, "model"),
            (await client.post("/v1/completions", json={"model": "tiny", "prompt": ""}), 400, "prompt"),
            (await client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "n": 2, "stream": True}), 400, "n"),
            (await client.post("/v1/completions", json={"model": "tiny", "prompt": [65] * 600}), 400, "prompt"),
            (await client.post("/v1/completions", content=b'{"model": "tiny", "\\ud800": 1}', headers=json_type), 400, "body"),
            (await client.get("/v1/completions"), 405, None),
            (await client.get("/nowhere"), 404, None),
            (await client.get("/v1/models/other"), 404, "model"),
            (await client.post("/v1/completions", content=b"x" * (9 << 20), headers=json_type), 400, None),
        ]
        for response, status, param in cases:
            assert response.status_code == status, response.text
            error = response.json()["error"]
            assert {"message", "type", "param", "code"} <= set(error) and error["param"] == param, error
            assert response.headers["x-request-id"] and response.headers["content-type"] == "application/json"
        assert harness.prefill[0].commands == [] and harness.decode[0].commands == []
        assert (await complete(harness, max_tokens=3))["choices"][0]["text"] == expected_text(3, 1)


async def test_request_id_is_echoed_when_it_is_harmless() -> None:
    async with running_router() as harness:
        assert (await harness.client.get("/healthz", headers={"x-request-id": "mine-1"})).headers["x-request-id"] == "mine-1"
        assert (
            (await harness.client.get("/healthz", headers={"x-request-id": "x" * 200})).headers["x-request-id"].startswith("req-")
        )
        response = await harness.client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 1})
        assert response.headers["x-request-id"] == response.json()["id"]


async def test_readiness_follows_the_decode_workers_liveness_does_not() -> None:
    async with running_router() as harness:
        assert (await harness.client.get("/readyz")).status_code == 200
        assert (await harness.client.get("/readyz")).json()["workers"] == {"decode": 1, "prefill": 1}
        await harness.withdraw(harness.decode[0])
        await harness.until(lambda: harness.num_usable(Role.DECODE) == 0)
        ready = await harness.client.get("/readyz")
        assert ready.status_code == 503 and ready.json()["reasons"] == ["no decode worker is ready"]
        assert (await harness.client.get("/healthz")).status_code == (await harness.client.get("/health")).status_code == 200
        response = await harness.client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT})
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["message"] == "no decode worker is ready"


async def test_tokenize_detokenize_models_version_metrics() -> None:
    async with running_router() as harness:
        client = harness.client
        tokens = (await client.post("/tokenize", json={"model": "tiny", "prompt": "héllo"})).json()
        assert tokens["count"] == 6 and tokens["tokens"] == ids_of("héllo")
        assert (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": "héllo"}
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == 512
        assert (await client.get("/version")).json() == {"version": "test"}
        assert b"baton_num_requests_running 0.0" in (await client.get("/metrics")).content


async def test_one_wide_log_line_per_request_without_prompt_or_text() -> None:
    async with running_router() as harness:
        text = (await complete(harness, max_tokens=20))["choices"][0]["text"]
        (line,) = harness.log_lines("request")
        assert line["outcome"] == "length" and line["num_tokens"] == 20 and line["attempts"] == 1
        assert "prefill p0" in line["placement_reason"] and line["transport"] == "tcp"
        assert set(line["stages"]) >= {"tokenise", "admit", "place", "dispatch", "prefill_queue", "prefill"}
        assert PROMPT not in harness.log_text and text not in harness.log_text
        entry = await harness.store.read_journal(line["request"])
        assert entry is not None and (entry.state, entry.num_tokens, entry.epoch) == ("finished", 20, 1)


async def test_openai_sdk_sync_async_stream_and_not() -> None:
    async with (
        running_router() as harness,
        openai.AsyncOpenAI(base_url=harness.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        chat: Any = client.chat.completions
        whole = await chat.create(model="tiny", messages=CHAT, max_tokens=9, seed=1)
        chunks = await chat.create(
            model="tiny", messages=CHAT, max_completion_tokens=9, seed=1, stream=True, stream_options={"include_usage": True}
        )
        got = [chunk async for chunk in chunks]
        assert "".join(c.choices[0].delta.content or "" for c in got if c.choices) == whole.choices[0].message.content
        assert got[-1].usage == whole.usage and whole.usage.completion_tokens == 9
        assert whole.usage.prompt_tokens_details.cached_tokens == 2
        text = await client.completions.create(model="tiny", prompt=ids_of(PROMPT), max_tokens=9, seed=1)
        assert text.choices[0].text == expected_text(9, 1)
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.BadRequestError) as refused:
            await chat.create(model="tiny", messages=CHAT, n=3)
        assert refused.value.param == "n"
        with pytest.raises(openai.NotFoundError):
            await chat.create(model="other", messages=CHAT)


async def test_openai_sync_client_in_a_thread() -> None:
    import asyncio

    async with running_router() as harness:

        def call() -> tuple[str, str]:
            with openai.OpenAI(base_url=harness.url + "/v1", api_key="none", max_retries=0) as client:
                whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=7, seed=1).choices[0].text
                chunks = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=7, seed=1, stream=True)
                return whole, "".join(chunk.choices[0].text for chunk in chunks)

        assert await asyncio.to_thread(call) == (expected_text(7, 1), expected_text(7, 1))
