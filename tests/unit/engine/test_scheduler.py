"""Claims about what the scheduler computes: tokens equal a lone run, budgets, prefix hits, stop conditions, refusals."""

from __future__ import annotations

import pytest

from common.types import FinishReason
from engine.batch import StepResults
from engine.commands import Abort, Generate, Sampled
from engine.prefix_index import PrefixIndex
from engine.scheduler import Scheduler, SchedulerSettings
from tests.fakes.engine_driver import EngineDriver, key, make_spec
from tests.fakes.kv_oracle import lone_run

VOCAB = 97
BORDER_LENGTHS = [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33]


def run_alone(spec, **settings):
    driver = EngineDriver(**settings)
    driver.handle(Generate(spec))
    driver.run_until_idle()
    driver.assert_no_block_held()
    return driver[spec.key]


@pytest.mark.parametrize("num_prompt", BORDER_LENGTHS)
@pytest.mark.parametrize("token_budget", [8, 64])
def test_tokens_equal_a_lone_run_around_block_borders_cold_and_warm(num_prompt: int, token_budget: int) -> None:
    driver = EngineDriver(token_budget=token_budget)
    cold, warm = (make_spec(name, range(10, 10 + num_prompt), 9) for name in ("cold", "warm"))
    driver.handle(Generate(cold))
    driver.run_until_idle()
    driver.handle(Generate(warm))
    driver.run_until_idle()
    expected = lone_run(cold, VOCAB)
    assert driver["cold"].tokens == driver["warm"].tokens == expected
    assert driver["cold"].ended.num_cached_tokens == 0
    assert driver["warm"].ended.num_cached_tokens == (num_prompt - 1) // 4 * 4, "one token at least is computed for its logits"
    driver.assert_no_block_held()


def test_neighbours_do_not_change_the_tokens() -> None:
    driver = EngineDriver(num_blocks=200, token_budget=24)
    specs = [make_spec(index, range(index, index + 3 * index + 1), 5 + index, seed=index) for index in range(12)]
    for spec in specs:
        driver.handle(Generate(spec))
        driver.step()
    driver.run_until_idle()
    for spec in specs:
        assert driver[spec.key].tokens == lone_run(spec, VOCAB)
        assert driver[spec.key].reason is FinishReason.LENGTH
    driver.assert_no_block_held()


def test_a_resumed_sequence_goes_on_at_the_next_index() -> None:
    whole = make_spec("whole", range(6), 10)
    expected = lone_run(whole, VOCAB)
    for num_emitted in range(1, 10):
        resumed = make_spec("again", range(6), 10, emitted=tuple(expected[:num_emitted]))
        outcome = run_alone(resumed)
        assert outcome.first_index == num_emitted
        assert outcome.tokens == expected[num_emitted:]
        assert outcome.ended.num_tokens == 10


def test_max_new_tokens_1_gives_exactly_one_token() -> None:
    outcome = run_alone(make_spec("a", range(4), 1))
    assert len(outcome.tokens) == 1 and outcome.reason is FinishReason.LENGTH and outcome.ended.num_tokens == 1


def test_a_stop_token_as_first_token_ends_the_sequence_and_is_reported() -> None:
    first = lone_run(make_spec("a", range(5)), VOCAB)[0]
    outcome = run_alone(make_spec("a", range(5), 9, stop_token_ids=(first,)))
    assert outcome.tokens == [first] and outcome.reason is FinishReason.STOP


def test_min_new_tokens_keeps_the_stop_token_from_being_sampled() -> None:
    first = lone_run(make_spec("a", range(5)), VOCAB)[0]
    spec = make_spec("a", range(5), 9, stop_token_ids=(first,), min_new_tokens=3)
    outcome = run_alone(spec)
    assert outcome.tokens == lone_run(spec, VOCAB)
    assert first not in outcome.tokens[:3] and len(outcome.tokens) >= 3


def test_long_prompts_are_chunked_and_never_swamp_decodes() -> None:
    driver = EngineDriver(num_blocks=128, token_budget=16, prefill_tokens_max=5)
    driver.handle(Generate(make_spec("decode", range(3), 60)))
    driver.step()
    driver.handle(Generate(make_spec("long", range(100, 140), 3)))
    for _ in range(8):
        events = driver.step()
        assert driver.last_batch.num_tokens == 6, "one decode and a chunk of five"
        assert key("decode") in [event.key for event in events if isinstance(event, Sampled)]
    assert len(driver["long"].tokens) == 1
    driver.run_until_idle()
    assert driver["long"].ended.num_chunks == 8
    assert driver["long"].tokens == lone_run(make_spec("long", range(100, 140), 3), VOCAB)


def test_a_short_prompt_does_not_wait_for_a_long_one_before_it() -> None:
    driver = EngineDriver(num_blocks=128, token_budget=16)
    driver.handle(Generate(make_spec("long", range(100, 200), 2)))
    driver.step()
    driver.handle(Generate(make_spec("short", range(6), 2)))
    driver.step()
    assert len(driver["short"].tokens) == 1, "it is computed in the first step after it came"
    driver.run_until_idle()
    assert driver["long"].tokens == lone_run(make_spec("long", range(100, 200), 2), VOCAB)
    assert driver["short"].tokens == lone_run(make_spec("short", range(6), 2), VOCAB)


def test_a_long_prompt_goes_on_while_short_ones_keep_coming() -> None:
    driver = EngineDriver(num_blocks=400, token_budget=16)
    driver.handle(Generate(make_spec("long", range(100, 180), 1)))
    for index in range(10):  # 80 tokens at 8 of 16 a step
        assert key("long") not in driver.outcomes
        driver.handle(Generate(make_spec(index, range(index * 20, index * 20 + 16), 1)))
        driver.step()
    assert len(driver["long"].tokens) == 1
    driver.run_until_idle()
    driver.assert_no_block_held()


def test_few_prompts_are_under_way_at_the_same_time() -> None:
    driver = EngineDriver(num_blocks=400, token_budget=16, prompts_at_once=3)
    for index in range(10):
        driver.handle(Generate(make_spec(index, range(index * 50, index * 50 + 40), 1)))
    driver.step()
    assert driver.scheduler.load().num_running == 3, "the others hold no blocks yet"
    driver.run_until_idle()


def test_the_token_budget_bounds_every_step() -> None:
    driver = EngineDriver(num_blocks=128, token_budget=10)
    for index in range(8):
        driver.handle(Generate(make_spec(index, range(index * 50, index * 50 + 17), 6)))
    while driver.step() is not None:
        assert driver.last_batch.num_tokens <= 10


def test_sequences_with_equal_prompts_share_blocks_but_other_tenants_do_not() -> None:
    driver = EngineDriver(token_budget=64)
    prompt = range(20, 37)
    driver.handle(Generate(make_spec("a", prompt, 30, salt=b"x")))
    driver.step()
    for name, salt in (("b", b"x"), ("c", b"y")):
        driver.handle(Generate(make_spec(name, prompt, 30, salt=salt)))
    driver.step()
    census = driver.scheduler.census()
    assert sum(census.held_by.values()) - census.held == 4, "a and b share four full blocks, c none"
    driver.run_until_idle()
    assert [driver[name].ended.num_cached_tokens for name in "abc"] == [0, 16, 0]
    assert driver["a"].tokens == driver["b"].tokens == driver["c"].tokens


def test_generated_tokens_are_prefix_cached_too() -> None:
    driver = EngineDriver()
    first = make_spec("a", range(6), 11)
    driver.handle(Generate(first))
    driver.run_until_idle()
    history = (*range(6), *driver["a"].tokens)
    driver.handle(Generate(make_spec("b", [*history, 5, 6], 3)))
    driver.run_until_idle()
    assert driver["b"].ended.num_cached_tokens == 16, "of 17 tokens the last was sampled, but its KV never computed"
    assert driver["b"].tokens == lone_run(make_spec("b", [*history, 5, 6], 3), VOCAB)


@pytest.mark.parametrize("num_steps", range(8))
def test_abort_at_any_time_frees_everything(num_steps: int) -> None:
    driver = EngineDriver(token_budget=8)
    driver.handle(Generate(make_spec("a", range(17), 20)))
    driver.handle(Generate(make_spec("b", range(40, 60), 5)))
    for _ in range(num_steps):
        driver.step()
    num_before = len(driver.outcomes[key("a")].tokens) if key("a") in driver.outcomes else 0
    (ended,) = driver.handle(Abort(key("a"), "client left"))
    assert ended.reason is FinishReason.ABORT and ended.num_tokens == num_before
    assert driver.handle(Abort(key("a"), "again")) == []
    driver.run_until_idle()
    assert driver["b"].tokens == lone_run(make_spec("b", range(40, 60), 5), VOCAB)
    driver.assert_no_block_held()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec("a", range(30), 3), "exceed 32 tokens"),
        (make_spec("a", range(30), 1, emitted=(5,)), "1 completion tokens exist already"),
        (make_spec("a", [], 1), "0 of 0 tokens"),
        (make_spec("a", [1, -1], 1), "token ids reach from -1"),
        (make_spec("a", [1, 1 << 32], 1), "token ids reach from 1 to 4294967296"),
    ],
)
def test_what_can_never_be_served_is_refused_as_invalid(spec, reason: str) -> None:
    driver = EngineDriver(max_sequence_tokens=32)
    (refused,) = driver.handle(Generate(spec))
    assert refused.error_kind == "InvalidRequest" and reason in refused.message
    assert driver.step() is None


def test_a_sequence_as_long_as_the_limit_and_the_pool_is_served_and_one_token_more_is_not() -> None:
    driver = EngineDriver(num_blocks=8)
    fits = make_spec("fits", range(20), 13)
    driver.handle(Generate(fits))
    (refused,) = driver.handle(Generate(make_spec("over", range(20), 14)))
    assert refused.error_kind == "InvalidRequest"
    driver.run_until_idle()
    assert driver["fits"].tokens == lone_run(fits, VOCAB), "32 tokens with KV on 8 blocks of 4, and the last one without"
    roomy = EngineDriver(num_blocks=8, max_sequence_tokens=1000)
    (refused,) = roomy.handle(Generate(make_spec("pool", range(20), 14)))
    assert "need 9 KV blocks, this worker has 8" in refused.message


def test_a_full_waiting_line_refuses_with_a_hint_and_takes_again_later() -> None:
    driver = EngineDriver(max_sequences=1, waiting_max=2)
    for name in "ab":
        assert driver.handle(Generate(make_spec(name, range(4)))) == []
    (refused,) = driver.handle(Generate(make_spec("c", range(4))))
    assert refused.error_kind == "Overloaded" and refused.retry_after_s > 0
    driver.step()
    assert driver.handle(Generate(make_spec("d", range(4)))) == []
    driver.run_until_idle()
    assert all(driver[name].reason is FinishReason.LENGTH for name in "abd")


def test_a_known_key_is_refused_and_the_first_holder_undisturbed() -> None:
    driver = EngineDriver()
    spec = make_spec("a", range(9), 6)
    driver.handle(Generate(spec))
    driver.step()
    (refused,) = driver.handle(Generate(spec))
    assert refused.error_kind == "InvalidRequest" and "already known" in refused.message
    driver.run_until_idle()
    assert driver["a"].tokens == lone_run(spec, VOCAB)


def test_commands_between_schedule_and_apply_are_a_bug() -> None:
    driver = EngineDriver()
    driver.handle(Generate(make_spec("a", range(9))))
    batch = driver.scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="step borders"):
        driver.scheduler.handle(Abort(key("a"), "x"), 0.0)
    with pytest.raises(AssertionError, match="last batch"):
        driver.scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="1 sample rows"):
        driver.scheduler.apply(batch, StepResults([]), 0.0)


def test_load_counts_what_waits_and_runs() -> None:
    driver = EngineDriver(num_blocks=32, max_sequences=1, token_budget=8)
    driver.handle(Generate(make_spec("a", range(20), 4)))
    driver.handle(Generate(make_spec("b", range(6), 4)))
    driver.step()
    load = driver.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (1, 1, 12 + 6)
    assert load.num_blocks_available == 32 - 5
    driver.run_until_idle()
    load = driver.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens, load.num_blocks_available) == (0, 0, 0, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_budget": 3}, "less than max_sequences"),
        ({"prefill_tokens_max": 65}, "more than token_budget"),
        ({"waiting_max": 0}, "waiting_max is 0"),
        ({"max_sequence_tokens": 1}, "max_sequence_tokens is 1"),
    ],
)
def test_contradicting_settings_are_refused(change, message: str) -> None:
    settings = {
        "block_size": 4,
        "token_budget": 64,
        "prefill_tokens_max": 64,
        "max_sequences": 8,
        "max_sequence_tokens": 64,
        "waiting_max": 4,
    }
    with pytest.raises(ValueError, match=message):
        SchedulerSettings(**{**settings, **change})


def test_settings_and_prefix_index_must_agree_on_the_block_size() -> None:
    driver = EngineDriver()
    settings = SchedulerSettings(
        block_size=8, token_budget=8, prefill_tokens_max=8, max_sequences=1, max_sequence_tokens=9, waiting_max=1
    )
    with pytest.raises(ValueError, match="block_size is 8"):
        Scheduler(settings, driver.allocator, PrefixIndex(driver.allocator, 4, b""))
