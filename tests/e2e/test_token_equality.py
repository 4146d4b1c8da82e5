"""The promise: disaggregated = aggregated = the plain model, token for token, on the real small model in fp32.

Prompt lengths lie around block borders (block size 16), caches are cold and then warm, KV goes over UCX. The reference is
transformers' own implementation, greedy, one prompt at a time.
"""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest

from tests.harness import Fleet

NUM_NEW_TOKENS = 24
BLOCK = 16
PROMPT_LENGTHS = [
    1,
    2,
    7,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    2 * BLOCK - 1,
    2 * BLOCK,
    2 * BLOCK + 1,
    47,
    48,
    49,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    300,
]

TEXT = (
    "The history of the lighthouse begins long before electricity. Keepers climbed the stairs every evening, trimmed the wicks and "
    "watched the sea until morning. When ships were made of wood and maps were drawn by hand, a single light could decide between a "
    "safe harbour and a wreck. Over time, oil replaced wood, glass lenses replaced mirrors, and engineers learned how to make a flash "
    "that every captain could recognise. Today most of the lights are automatic, and many of the towers are museums where children "
    "count the steps. Still, on a stormy night, the old rule holds: if you can see the light, you know where you are. "
) * 4


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    """20 different prompts cut from real text, so that no two share their first block."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    starts = random.Random(7).sample(range(len(ids) - max(PROMPT_LENGTHS)), len(PROMPT_LENGTHS))
    return [ids[start : start + length] for start, length in zip(starts, PROMPT_LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def reference(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers' implementation."""
    import torch
    from transformers import AutoModelForCausalLM

    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            output = causal_lm.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_NEW_TOKENS,
                min_new_tokens=NUM_NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            answers.append(output[0, len(prompt) :].tolist())
    return answers


def complete(fleet: Fleet, prompt: list[int], **options: object) -> dict[str, object]:
    body = {
        "model": "smollm2-135m",
        "prompt": prompt,
        "max_tokens": NUM_NEW_TOKENS,
        "ignore_eos": True,
        "timeline": True,
    } | options
    reply = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def token_ids(answer: dict[str, object]) -> list[int]:
    return list(answer["baton"]["token_ids"])  # type: ignore[index]


def assert_went_through_prefill(answer: dict[str, object]) -> None:
    timeline = answer["baton"]
    assert timeline["prefill_worker"], timeline  # type: ignore[index]
    assert timeline["transport"].startswith("ucx"), timeline  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_greedy_tokens_equal_transformers_aggregated_and_disaggregated(
    prompts: list[list[int]], reference: list[list[int]], aggregated: Fleet, disaggregated: Fleet
) -> None:
    for prompt, expected in zip(prompts, reference, strict=True):
        for heat in ("cold", "warm"):
            alone = complete(aggregated, prompt, temperature=0)
            assert token_ids(alone) == expected, f"aggregated, {heat}, {len(prompt)} tokens"
            handed_over = complete(disaggregated, prompt, temperature=0)
            assert_went_through_prefill(handed_over)
            assert token_ids(handed_over) == expected, f"disaggregated, {heat}, {len(prompt)} tokens"
            assert handed_over["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"] == NUM_NEW_TOKENS  # type: ignore[index]
            assert handed_over["choices"][0]["text"] == alone["choices"][0]["text"]  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_seeded_sampling_is_equal_aggregated_and_disaggregated(
    prompts: list[list[int]], reference: list[list[int]], aggregated: Fleet, disaggregated: Fleet
) -> None:
    sampled_unlike_greedy = 0
    for seed, (prompt, greedy) in enumerate(zip(prompts, reference, strict=True)):
        options = {
            "temperature": 0.9,
            "top_p": 0.95,
            "top_k": 50 if seed % 2 else 0,
            "min_p": 0.02 if seed % 3 else 0.0,
            "seed": seed,
        }
        alone = token_ids(complete(aggregated, prompt, **options))
        assert token_ids(complete(disaggregated, prompt, **options)) == alone, f"seed {seed}, {len(prompt)} tokens"
        sampled_unlike_greedy += alone != greedy
    assert sampled_unlike_greedy >= len(prompts) // 2, "sampling that always equals greedy would make this test empty"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_logprobs_are_equal_on_both_ways_and_those_of_transformers(
    model: Path, prompts: list[list[int]], reference: list[list[int]], aggregated: Fleet, disaggregated: Fleet
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, greedy in list(zip(prompts, reference, strict=True))[::4]:
        alone = complete(aggregated, prompt, temperature=0, logprobs=5)["choices"][0]["logprobs"]  # type: ignore[index]
        answer = complete(disaggregated, prompt, temperature=0, logprobs=5)
        assert_went_through_prefill(answer)
        assert answer["choices"][0]["logprobs"] == alone, f"{len(prompt)} tokens"  # type: ignore[index]
        with torch.inference_mode():
            logits = causal_lm(torch.tensor([prompt + greedy])).logits[0, len(prompt) - 1 : -1].double()
        expected = torch.log_softmax(logits, dim=-1)
        chosen = expected.gather(1, torch.tensor(greedy)[:, None]).squeeze(1)
        assert alone["token_logprobs"] == pytest.approx(chosen.tolist(), abs=1e-4)
        for index, top in enumerate(alone["top_logprobs"]):
            assert sorted(top.values(), reverse=True)[:5] == pytest.approx(expected[index].topk(5).values.tolist(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_scored_prompts_are_equal_on_both_ways_and_those_of_transformers(
    model: Path, prompts: list[list[int]], aggregated: Fleet, disaggregated: Fleet
) -> None:
    """The request of lm-eval: token ids, echo, logprobs, one token or none. Warm too: a prefix hit must leave nothing out."""
    import torch
    from transformers import AutoModelForCausalLM

    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt in prompts[1::4]:
        with torch.inference_mode():
            logits = causal_lm(torch.tensor([prompt])).logits[0, :-1].double()
        expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1).tolist()
        for max_tokens in (1, 0):
            options = {"temperature": 0, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
            alone = complete(aggregated, prompt, **options)["choices"][0]  # type: ignore[index]
            assert complete(disaggregated, prompt, **options)["choices"][0] == alone  # type: ignore[index]
            values = alone["logprobs"]["token_logprobs"]
            assert values[0] is None and len(values) == len(prompt) + max_tokens
            assert values[1 : len(prompt)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_penalties_and_bias_are_equal_on_both_ways_and_change_the_answer(
    prompts: list[list[int]], reference: list[list[int]], aggregated: Fleet, disaggregated: Fleet
) -> None:
    banned = str(reference[8][0])
    changes = [
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"logit_bias": {banned: -100}},
        {"frequency_penalty": -0.7, "temperature": 0.8, "seed": 3, "logit_bias": {banned: 5}},
    ]
    for options in changes:
        fields = {"temperature": 0} | options
        alone = token_ids(complete(aggregated, prompts[8], **fields))
        assert token_ids(complete(disaggregated, prompts[8], **fields)) == alone, options
        assert alone != reference[8], f"{options} changed nothing"
    assert int(banned) not in token_ids(complete(disaggregated, prompts[8], temperature=0, logit_bias={banned: -100}))


def test_concurrent_requests_give_the_same_tokens_as_lone_ones(
    prompts: list[list[int]], reference: list[list[int]], disaggregated: Fleet
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda prompt: complete(disaggregated, prompt, temperature=0), prompts))
    assert [token_ids(answer) for answer in answers] == reference


def test_cached_tokens_are_zero_when_cold_and_whole_blocks_when_warm(disaggregated: Fleet) -> None:
    prompt = [5000 + i for i in range(50)]
    cold, warm = complete(disaggregated, prompt, temperature=0), complete(disaggregated, prompt, temperature=0)
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (cold, warm)]  # type: ignore[index]
    assert cached == [0, 48]
    assert token_ids(cold) == token_ids(warm)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_one_and_two_tokens_are_exactly_that_many(
    prompts: list[list[int]], reference: list[list[int]], disaggregated: Fleet, max_tokens: int
) -> None:
    answer = complete(disaggregated, prompts[10], temperature=0, max_tokens=max_tokens)
    assert token_ids(answer) == reference[10][:max_tokens]
    assert answer["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
