"""Logprobs of prompts: each position exactly once and in order, whatever the chunks, the prefix cache and preemption do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.commands import Generate, Prefill, SequenceSpec
from engine.scheduler import RATED_CHUNK_MAX
from engine.sequence import Kind, Sequence
from tests.fakes.engine_driver import EngineDriver, Outcome, make_spec
from tests.fakes.kv_oracle import lone_run

VOCAB = 97


def rated(name: str, num_prompt: int, max_new_tokens: int = 3, emitted: tuple[int, ...] = ()) -> SequenceSpec:
    return replace(make_spec(name, range(10, 10 + num_prompt), max_new_tokens, emitted=emitted), num_prompt_logprobs=1)


def assert_rated_once(outcome: Outcome, spec: SequenceSpec) -> None:
    """Position p was rated by the row of p - 1, and as the token that stands there."""
    assert [-value.logprob for value in outcome.prompt_logprobs] == list(range(spec.num_prompt_tokens - 1))
    assert [value.top[0][0] for value in outcome.prompt_logprobs] == list(spec.token_ids[1 : spec.num_prompt_tokens])


@pytest.mark.parametrize("num_prompt", [1, 2, 3, 4, 5, 8, 9, 33])
@pytest.mark.parametrize("token_budget", [8, 64])
@pytest.mark.parametrize("command", [Generate, Prefill])
def test_each_position_is_rated_once_in_any_chunks_cold_and_warm(num_prompt: int, token_budget: int, command: type) -> None:
    driver = EngineDriver(token_budget=token_budget)
    driver.handle(Generate(make_spec("before", range(10, 10 + num_prompt))))
    driver.run_until_idle()
    for name in ("cold", "warm"):
        spec = rated(name, num_prompt)
        driver.handle(command(spec))
        driver.run_until_idle()
        assert_rated_once(driver[name], spec)
        assert driver[name].ended.num_cached_tokens == 0, "what is rated must be computed"
        assert driver[name].tokens == lone_run(spec, VOCAB)[: len(driver[name].tokens)]


def test_rated_prompts_share_steps_with_others_and_change_nothing_for_them() -> None:
    driver = EngineDriver(token_budget=16)
    specs = [rated("a", 21), make_spec("b", range(40, 61), 5), rated("c", 9), make_spec("d", range(70, 75), 5)]
    for spec in specs:
        driver.handle(Generate(spec))
    driver.run_until_idle()
    for spec in specs:
        assert driver[spec.key].tokens == lone_run(spec, VOCAB)
        if spec.num_prompt_logprobs is not None:
            assert_rated_once(driver[spec.key], spec)
        else:
            assert not driver[spec.key].prompt_logprobs


def test_preemption_rates_nothing_twice() -> None:
    driver = EngineDriver(num_blocks=14, token_budget=16, max_sequences=4)
    specs = [rated(name, 9 + index, 16) for index, name in enumerate("abc")]
    for spec in specs:
        driver.handle(Generate(spec))
    driver.run_until_idle()
    assert driver.scheduler.num_preemptions > 0, "the pool was large enough: nothing was tested"
    for spec in specs:
        assert_rated_once(driver[spec.key], spec)
        assert driver[spec.key].tokens == lone_run(spec, VOCAB)


def test_only_the_prompt_is_rated_when_a_stream_goes_on_and_only_by_who_computes_it() -> None:
    driver = EngineDriver()
    resumed = rated("resumed", 6, 8, emitted=(50, 51))
    driver.handle(Generate(resumed))
    driver.run_until_idle()
    assert_rated_once(driver["resumed"], resumed)
    assert Sequence(rated("received", 6), Kind.GENERATE, 1).rates_prompt
    assert not Sequence(rated("received", 6), Kind.RECEIVE, 1).rates_prompt


def test_a_step_projects_a_bounded_number_of_rated_rows() -> None:
    num_prompt = 2 * RATED_CHUNK_MAX + 10
    driver = EngineDriver(num_blocks=200, token_budget=1024)
    spec = rated("long", num_prompt)
    driver.handle(Generate(spec))
    sizes = []
    while driver.step() is not None:
        assert driver.last_batch is not None
        sizes += [len(rows.token_ids) for rows in driver.last_batch.prompt_rows]
    assert max(sizes) <= RATED_CHUNK_MAX and sum(sizes) == num_prompt - 1
    assert_rated_once(driver["long"], spec)
