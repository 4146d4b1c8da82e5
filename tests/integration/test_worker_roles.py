"""Both worker roles joined in one process over the KV oracle: right tokens, one last word per attempt, nothing left held."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import count

import pytest

from engine.commands import SequenceSpec
from tests.fakes.engine_driver import make_spec
from tests.fakes.kv_oracle import lone_run
from tests.fakes.worker_pair import BLOCK, VOCAB, WorkerPair, worker_pair

NAMES = count()


def spec_of(num_prompt_tokens: int, max_new_tokens: int = 6, *, start: int = 0, **options: object) -> SequenceSpec:
    prompt = [(start + i * 7) % VOCAB for i in range(num_prompt_tokens)]
    return make_spec(f"w{next(NAMES)}", prompt, max_new_tokens, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["inproc", "tcp"])
async def test_tokens_equal_a_lone_run_cold_and_warm_around_block_borders(scheme: str) -> None:
    async with worker_pair(scheme=scheme) as pair:
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 30, 33):
            for _ in ("cold", "warm on both"):
                spec = spec_of(length, start=length)
                assert await pair.tokens(spec) == lone_run(spec, VOCAB)
                assert pair.decode_session.kinds(spec.key)[0] == "reserved"
        await pair.check_idle()


@pytest.mark.parametrize("warm", ["prefill", "decode"])
async def test_prefix_that_only_one_side_has_cached_changes_no_token(warm: str) -> None:
    async with worker_pair() as pair:
        earlier, spec = spec_of(5 * BLOCK + 1), spec_of(5 * BLOCK + 3)
        if warm == "decode":
            pair.send_generate(earlier)
            await pair.decode_session.sees(earlier.key, "finished")
        else:
            pair.decode.is_draining = True
            pair.send_prefill(earlier)
            await pair.prefill_session.sees(earlier.key, "prefilled")
            pair.send_reserve(earlier)
            await pair.ends(earlier.key)
            pair.decode.is_draining = False
        assert await pair.tokens(spec) == lone_run(spec, VOCAB)
        prefilled = await pair.prefill_session.sees(spec.key, "prefilled")
        reserved = await pair.decode_session.sees(spec.key, "reserved")
        cached = (prefilled.prefilled.num_cached_tokens, reserved.reserved.num_cached_tokens)
        assert cached == ((5 * BLOCK, 0) if warm == "prefill" else (0, 5 * BLOCK))
        await pair.check_idle()


async def test_prompt_that_decode_has_whole_moves_no_byte_but_its_first_token() -> None:
    async with worker_pair() as pair:
        earlier, spec = spec_of(5 * BLOCK), spec_of(5 * BLOCK)
        pair.send_generate(earlier)
        await pair.decode_session.sees(earlier.key, "finished")
        assert await pair.tokens(spec) == lone_run(spec, VOCAB)
        reserved = await pair.decode_session.sees(spec.key, "reserved")
        handed_over = (await pair.decode_session.sees(spec.key, "handed_over")).handed_over
        assert reserved.reserved.num_cached_tokens == 5 * BLOCK
        assert handed_over.num_frames == handed_over.num_bytes == 0 < handed_over.committed_s
        await pair.check_idle()


async def test_handed_over_sequences_that_are_preempted_go_on_with_the_same_tokens() -> None:
    async with worker_pair(decode_blocks=24) as pair:
        specs = [spec_of(9, 24, start=11 * n) for n in range(5)]
        for spec in specs:
            pair.send_reserve(spec)
        for spec in specs:
            await pair.decode_session.sees(spec.key, "reserved")
        pair.decode_engine.runner.gate.clear()  # all of them are to run at once
        for spec in specs:
            pair.send_prefill(spec)
        for spec in specs:
            await pair.prefill_session.sees(spec.key, "finished")
        pair.decode_engine.runner.gate.set()
        for spec in specs:
            await pair.ends(spec.key)
            assert pair.merged(spec) == lone_run(spec, VOCAB)
        assert pair.decode_engine.loop.counts().num_preemptions > 0
        await pair.check_idle()


async def test_resumed_sequence_goes_on_at_the_next_index() -> None:
    async with worker_pair() as pair:
        whole = spec_of(10, 8)
        expected = lone_run(whole, VOCAB)
        resumed = spec_of(10, 8, emitted=tuple(expected[:3]))
        assert await pair.tokens(resumed) == expected[3:]
        await pair.check_idle()


@pytest.mark.parametrize("max_new_tokens", [1, 2])
async def test_one_and_two_tokens(max_new_tokens: int) -> None:
    async with worker_pair() as pair:
        spec = spec_of(9, max_new_tokens)
        assert await pair.tokens(spec) == lone_run(spec, VOCAB)
        assert pair.prefill_session.events[spec.key][-1].finished.reason == ("length" if max_new_tokens == 1 else "handed_over")
        await pair.check_idle()


async def test_stop_token_at_index_0_ends_both_ends_without_a_lease() -> None:
    async with worker_pair() as pair:
        first = lone_run(spec_of(9, 1), VOCAB)[0]
        spec = spec_of(9, 6, stop_token_ids=(first,))
        assert await pair.tokens(spec) == [first]
        assert pair.prefill_session.events[spec.key][-1].finished.reason == "stop"
        assert pair.decode_session.kinds(spec.key)[-1] == "failed"
        await pair.check_idle()


async def test_refusal_by_decode_frees_prefill_at_once() -> None:
    async with worker_pair(decode_blocks=4) as pair:
        spec = spec_of(40)
        pair.send_prefill(spec)
        pair.send_reserve(spec)
        await pair.ends(spec.key, timeout_s=4.0)
        assert pair.decode_session.failure(spec.key) == "InvalidRequest"
        await pair.check_idle()


async def test_abort_in_the_moment_of_the_reservation_leaves_nothing_behind() -> None:
    """The receive task is cancelled before its first step: none of its own code runs then."""
    async with worker_pair() as pair:
        spec = spec_of(20)
        abort_at_reserved(pair, spec)
        pair.send_reserve(spec)
        pair.send_prefill(spec)
        await pair.ends(spec.key, timeout_s=4.0)
        assert pair.decode_session.kinds(spec.key) == ["reserved", "finished"]
        await pair.check_idle()


def abort_at_reserved(pair: WorkerPair, spec: SequenceSpec) -> None:
    """As if the router's abort stood in the same turn of the event loop as the engine's answer."""
    post = pair.decode_session.post

    def post_and_abort(event: object) -> None:
        post(event)  # type: ignore[arg-type]
        if pair.decode_session.kinds(spec.key) == ["reserved"]:
            asyncio.get_running_loop().call_soon(lambda: pair.abort(spec.key, prefill=False, decode=True))

    pair.decode_session.post = post_and_abort  # type: ignore[method-assign]


async def test_deadline_ends_both_ends_with_that_error() -> None:
    async with worker_pair() as pair:
        spec = spec_of(12, 6)
        pair.send_reserve(spec, deadline_s=0.2)  # prefill never hears of it
        async with asyncio.timeout(4.0):
            await pair.decode_session.seen(spec.key, "end").wait()
        assert pair.decode_session.failure(spec.key) == "DeadlineExceeded"
        await pair.check_idle()


async def test_draining_workers_refuse_and_say_so() -> None:
    async with worker_pair() as pair:
        pair.prefill.drain()
        pair.decode.drain()
        spec = spec_of(8)
        pair.send_prefill(spec)
        pair.send_generate(spec)
        await pair.ends(spec.key)
        assert pair.prefill_session.failure(spec.key) == pair.decode_session.failure(spec.key) == "Draining"


@pytest.mark.parametrize("scheme", ["inproc", "tcp"])
async def test_300_randomly_aborted_requests_leak_nothing_and_disturb_nobody(scheme: str) -> None:
    rng = random.Random(5)
    async with worker_pair(scheme=scheme, prefill_blocks=256, decode_blocks=256) as pair:
        limit = asyncio.Semaphore(8)
        finished = 0

        async def one() -> None:
            nonlocal finished
            spec = spec_of(rng.choice([1, 3, 4, 5, 17, 40]), rng.choice([2, 6, 30]), start=rng.randrange(VOCAB))
            async with limit:
                legs: list[Callable[..., None]] = [pair.send_prefill, pair.send_reserve]
                rng.shuffle(legs)
                for leg in legs:
                    leg(spec)
                    if rng.random() < 0.3:
                        await asyncio.sleep(0)
                if rng.random() < 0.8:
                    for _ in range(rng.choice([0, 1, 2, 5, 20, 60])):
                        await asyncio.sleep(0)
                    pair.abort(spec.key, prefill=rng.random() < 0.9, decode=rng.random() < 0.9)
                    await asyncio.sleep(0)
                    pair.abort(spec.key, prefill=True, decode=True)
                    await pair.ends(spec.key)
                else:
                    await pair.ends(spec.key)
                    tokens = pair.prefill_session.tokens(spec.key) | pair.decode_session.tokens(spec.key)
                    assert [tokens[index] for index in sorted(tokens)] == lone_run(spec, VOCAB)
                    finished += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(300):
                group.create_task(one())
        assert finished > 20
        await pair.check_idle()


@pytest.mark.parametrize("seed", [1, 2])
async def test_300_requests_on_pools_that_are_too_small_end_once_each_and_right_where_they_finish(seed: int) -> None:
    """Refusals, preemption, deadlines, local prompts, second epochs and aborts of either leg, all at once."""
    rng = random.Random(seed)
    async with worker_pair(prefill_blocks=40, decode_blocks=32, num_slabs=2) as pair:
        limit = asyncio.Semaphore(10)
        endings: set[str] = set()

        async def one() -> None:
            spec = spec_of(rng.choice([1, 4, 8, 19, 50]), rng.choice([1, 2, 9, 40]), start=rng.randrange(4))
            deadline_s = rng.choice([0.0, 0.0, 0.002, 0.02])
            is_local = rng.random() < 0.2
            async with limit:
                if is_local:
                    pair.send_generate(spec)
                else:
                    legs: list[Callable[..., None]] = [pair.send_prefill, pair.send_reserve]
                    rng.shuffle(legs)
                    for leg in legs:
                        leg(spec, deadline_s)
                        await turns(rng.choice([0, 0, 3, 30]))
                if rng.random() < 0.5:
                    await turns(rng.choice([0, 1, 4, 40, 150]))
                    pair.abort(spec.key, prefill=rng.random() < 0.5, decode=rng.random() < 0.5)
                async with asyncio.timeout(8.0):
                    if not is_local:
                        # What the router does when a leg ends without success: the other leg is aborted too.
                        await pair.prefill_session.seen(spec.key, "end").wait()
                        if pair.reason(pair.prefill_session, spec) != "handed_over":
                            pair.abort(spec.key, prefill=False, decode=True)
                    await pair.decode_session.seen(spec.key, "end").wait()
                reason = pair.reason(pair.decode_session, spec)
                endings.add(reason)
                if reason in ("stop", "length"):
                    assert pair.merged(spec) == lone_run(spec, VOCAB)

        async with asyncio.TaskGroup() as group:
            for _ in range(300):
                group.create_task(one())
        assert {"length", "abort", "Overloaded", "DeadlineExceeded"} <= endings
        await pair.check_idle()


async def turns(num_turns: int) -> None:
    for _ in range(num_turns):
        await asyncio.sleep(0)


async def test_router_that_leaves_takes_its_attempts_along() -> None:
    async with worker_pair() as pair:
        specs = [spec_of(20, 200, start=n) for n in range(5)]
        for spec in specs:
            pair.send_prefill(spec)
            pair.send_reserve(spec)
        await asyncio.sleep(0)
        pair.prefill.on_session_closed(pair.prefill_session)
        pair.decode.on_session_closed(pair.decode_session)
        for spec in specs:
            await pair.ends(spec.key)
        await pair.check_idle()
