"""Both worker roles where one leg fails, is refused, doubled, held or cut off: each side hears it at once and nothing stays held.

The pair's teardown adds to every test: no task and no error of the event loop is left, and no lease had to expire unless said so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from common.errors import Draining, Overloaded
from common.ids import AttemptKey
from engine import commands
from engine.commands import Command
from kvtransfer.settings import FabricSettings
from prefill_service.worker import PrefillLimits
from tests.fakes.kv_oracle import lone_run
from tests.fakes.worker_pair import VOCAB, Recorder, worker_pair
from tests.integration.test_worker_roles import spec_of

AT_ONCE_S = 2.0
"""Far below every lease (10 s): what is heard in this time was said, not expired."""
IMPATIENT = FabricSettings(heartbeat_s=0.05, suspect_s=1.0, transfer_s=2.0, lease_s=3.0, open_wait_s=0.1, sweep_s=0.02)


def refusing(submit: Callable[[Command], None], kind: type, num_refusals: int = 1) -> Callable[[Command], None]:
    """A command queue that is full just when commands of this kind come."""
    left = num_refusals

    def submit_or_refuse(command: Command) -> None:
        nonlocal left
        if isinstance(command, kind) and left > 0:
            left -= 1
            raise Overloaded("the command queue is full", retry_after_s=0.5)
        submit(command)

    return submit_or_refuse


# one side refuses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["prefill", "reserve"])
@pytest.mark.parametrize("why", ["draining", "too long", "queue full", "engine refuses"])
async def test_refusal_by_prefill_ends_the_handoff_at_decode_at_once(why: str, first: str) -> None:
    async with worker_pair(prefill_blocks=6) as pair:
        kind = {"draining": "Draining", "queue full": "Overloaded"}.get(why, "InvalidRequest")
        if why == "draining":
            pair.prefill.drain()
        elif why == "queue full":
            pair.prefill.submit = refusing(pair.prefill.submit, commands.Prefill)
        elif why == "engine refuses":
            pair.prefill.limits = PrefillLimits(VOCAB, 1000)
        spec = spec_of(9 if kind != "InvalidRequest" else 60)
        legs: list[Callable[..., None]] = [pair.send_prefill, pair.send_reserve]
        for leg in legs if first == "prefill" else reversed(legs):
            leg(spec)
        await pair.ends(spec.key, AT_ONCE_S)
        assert pair.prefill_session.failure(spec.key) == kind
        assert pair.decode_session.failure(spec.key) == "HandoffFailed"
        await pair.check_idle()


async def test_refusal_by_prefill_of_an_older_epoch_leaves_the_newer_one_alone() -> None:
    async with worker_pair() as pair:
        newer = spec_of(9)
        newer = replace(newer, key=AttemptKey(newer.key.request_id, 2))
        older = replace(newer, key=AttemptKey(newer.key.request_id, 1))
        pair.send_reserve(newer, fields={"handoff_id": "ho-shared"})
        await pair.decode_session.sees(newer.key, "reserved")
        pair.prefill.drain()
        pair.send_prefill(older, handoff_id="ho-shared")
        assert pair.prefill_session.failure(older.key) == "Draining"
        pair.prefill.is_draining = False
        pair.send_prefill(newer, handoff_id="ho-shared")
        await pair.ends(newer.key, AT_ONCE_S)
        assert pair.merged(newer) == lone_run(newer, VOCAB)
        await pair.check_idle()


async def test_refusal_by_decode_after_token_0_fails_prefill_with_that_kind() -> None:
    async with worker_pair() as pair:
        spec = spec_of(20)
        pair.send_prefill(spec)
        await pair.prefill_session.sees(spec.key, "prefilled")
        pair.decode.drain()
        pair.send_reserve(spec)
        await pair.ends(spec.key, AT_ONCE_S)
        assert pair.prefill_session.kinds(spec.key) == ["tokens", "prefilled", "failed"]
        assert pair.prefill_session.failure(spec.key) == pair.decode_session.failure(spec.key) == "Draining"
        await pair.check_idle()


async def test_full_pool_of_decode_refuses_as_overload_and_the_running_one_goes_on() -> None:
    async with worker_pair(decode_blocks=10) as pair:
        running, refused = spec_of(20, 15), spec_of(20, 15, start=50)
        pair.send_reserve(running)
        await pair.decode_session.sees(running.key, "reserved")
        pair.send_prefill(refused)
        pair.send_reserve(refused)
        await pair.ends(refused.key, AT_ONCE_S)
        failed = (await pair.decode_session.sees(refused.key, "end")).failed
        assert failed.kind == "Overloaded" and failed.retry_after_s > 0
        assert pair.prefill_session.failure(refused.key) == "Overloaded"
        pair.send_prefill(running)
        await pair.ends(running.key)
        assert pair.merged(running) == lone_run(running, VOCAB)
        await pair.check_idle()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefill_kv_address", ""),
        ("prefill_kv_address", "127.0.0.1"),
        ("prefill_kv_address", "x" * 300 + ":1"),
        ("prefill_worker_id", ""),
        ("prefill_worker_id", "w" * 500),
        ("prefill_incarnation", "i" * 500),
        ("handoff_id", ""),
        ("handoff_id", "h" * 200),
    ],
)
async def test_reserve_that_names_no_prefill_worker_fails_and_stops_nobody(field: str, value: str) -> None:
    async with worker_pair() as pair:
        bad, good = spec_of(9), spec_of(9)
        pair.send_reserve(bad, fields={field: value})
        await pair.decode_session.sees(bad.key, "end", AT_ONCE_S)
        assert pair.decode_session.failure(bad.key) == "InvalidRequest"
        assert await pair.tokens(good) == lone_run(good, VOCAB)
        await pair.check_idle()


async def test_epoch_beyond_the_fabrics_range_is_refused_by_both() -> None:
    async with worker_pair() as pair:
        spec = spec_of(9)
        spec = replace(spec, key=AttemptKey(spec.key.request_id, 1 << 63))
        pair.send_prefill(spec)
        pair.send_reserve(spec)
        await pair.ends(spec.key, AT_ONCE_S)
        assert pair.prefill_session.failure(spec.key) == pair.decode_session.failure(spec.key) == "InvalidRequest"
        await pair.check_idle()


# doubled commands ----------------------------------------------------------------------------------------------------


async def test_command_that_comes_twice_on_one_session_is_dropped_and_the_attempt_goes_on() -> None:
    async with worker_pair() as pair:
        spec = spec_of(30, 20)
        for leg in (pair.send_reserve, pair.send_prefill):
            leg(spec)
            leg(spec)
        await pair.decode_session.sees(spec.key, "reserved")
        pair.send_reserve(spec)
        await pair.ends(spec.key)
        assert pair.merged(spec) == lone_run(spec, VOCAB)
        await pair.check_idle()


async def test_attempt_of_another_router_is_refused_to_that_router_alone() -> None:
    async with worker_pair() as pair:
        spec, other = spec_of(30, 20), Recorder()
        pair.send_reserve(spec)
        pair.send_prefill(spec)
        pair.send_reserve(spec, session=other)
        assert other.failure(spec.key) == "InvalidRequest"
        other = Recorder()
        pair.send_prefill(spec, session=other)
        assert other.failure(spec.key) == "InvalidRequest"
        await pair.ends(spec.key)
        assert pair.merged(spec) == lone_run(spec, VOCAB)
        await pair.check_idle()


async def test_prefill_that_names_the_handoff_of_another_attempt_is_refused_and_takes_nothing_from_it() -> None:
    async with worker_pair() as pair:
        owner, thief = spec_of(30), spec_of(30)
        pair.send_prefill(owner)
        pair.send_prefill(thief, handoff_id=f"ho-{owner.key}")
        assert pair.prefill_session.failure(thief.key) == "StaleEpoch"
        pair.send_reserve(owner)
        await pair.ends(owner.key)
        assert pair.merged(owner) == lone_run(owner, VOCAB)
        await pair.check_idle()


# full queues ---------------------------------------------------------------------------------------------------------


async def test_commit_that_a_full_queue_refuses_fails_the_attempt_and_frees_its_blocks() -> None:
    async with worker_pair() as pair:
        pair.decode.submit = refusing(pair.decode.submit, commands.Commit)
        spec = spec_of(20)
        pair.send_prefill(spec)
        pair.send_reserve(spec)
        await pair.ends(spec.key, AT_ONCE_S)
        assert pair.decode_session.failure(spec.key) == "Overloaded"
        assert pair.prefill_session.events[spec.key][-1].finished.reason == "handed_over"
        await pair.check_idle()


async def test_aborts_and_releases_that_a_full_queue_refuses_are_tried_again() -> None:
    async with worker_pair() as pair:
        pair.decode.submit = refusing(pair.decode.submit, commands.Abort, 2)
        pair.prefill.submit = refusing(refusing(pair.prefill.submit, commands.Abort, 2), commands.ReleaseHandoff, 1)
        spec = spec_of(40, 60)
        pair.prefill_engine.runner.gate.clear()
        pair.send_prefill(spec)
        pair.send_reserve(spec)
        await pair.decode_session.sees(spec.key, "reserved")
        pair.abort(spec.key, prefill=True, decode=True)
        pair.prefill_engine.runner.gate.set()
        await pair.ends(spec.key, AT_ONCE_S)
        await pair.check_idle()


# moments -------------------------------------------------------------------------------------------------------------


async def test_tokens_of_steps_that_outran_an_abort_are_not_sent() -> None:
    async with worker_pair() as pair:
        runner, spec = pair.decode_engine.runner, spec_of(9, 100)
        runner.gate.clear()
        pair.send_prefill(spec)
        pair.send_reserve(spec)
        await runner.is_held()  # in the first decode step
        pair.abort(spec.key, prefill=False, decode=True)
        runner.gate.set()  # it still samples a token
        await pair.ends(spec.key, AT_ONCE_S)
        assert runner.num_steps == 1 and pair.decode_session.kinds(spec.key) == ["reserved", "finished"]
        assert pair.decode_session.events[spec.key][-1].finished.reason == "abort"
        await pair.check_idle()


async def test_sequence_that_ends_by_itself_behind_an_abort_does_not_claim_a_whole_answer() -> None:
    async with worker_pair() as pair:
        runner, spec = pair.decode_engine.runner, spec_of(9, 2)
        runner.gate.clear()
        pair.send_prefill(spec)
        pair.send_reserve(spec)
        await runner.is_held()  # in the step that samples the last token
        pair.abort(spec.key, prefill=False, decode=True)
        runner.gate.set()
        await pair.ends(spec.key, AT_ONCE_S)
        assert pair.decode_session.events[spec.key][-1].finished.reason == "abort"
        assert pair.decode_session.tokens(spec.key) == {}
        await pair.check_idle()


async def test_prefill_aborted_before_its_engine_command_is_taken_computes_nothing() -> None:
    async with worker_pair() as pair:
        engine = pair.prefill_engine
        running, queued = spec_of(9), spec_of(9, start=40)
        engine.runner.gate.clear()
        pair.send_prefill(running)
        await engine.runner.is_held()
        pair.send_prefill(queued)
        pair.abort(queued.key, prefill=True, decode=False)
        engine.runner.gate.set()
        end = await pair.prefill_session.sees(queued.key, "end")
        assert end.finished.reason == "abort" and pair.prefill_session.kinds(queued.key) == ["finished"]
        pair.send_reserve(queued)  # the late leg of the aborted attempt is answered at once
        pair.send_reserve(running)
        await pair.ends(running.key, AT_ONCE_S)
        await pair.ends(queued.key, AT_ONCE_S)
        assert pair.merged(running) == lone_run(running, VOCAB)
        await pair.check_idle()


async def test_fabric_that_lets_go_in_the_middle_of_the_prompt_ends_the_attempt_once_its_sequence_has() -> None:
    async with worker_pair(chunk=8) as pair:
        engine, spec = pair.prefill_engine, spec_of(60)
        engine.runner.gate.clear()
        pair.send_prefill(spec)
        await engine.runner.is_held()
        pair.decode.drain()
        pair.send_reserve(spec)  # refused: on_released comes while the engine is inside the first chunk
        async with asyncio.timeout(AT_ONCE_S):
            while pair.prefill.num_handoffs:  # noqa: ASYNC110 - the release has no event towards the router
                await asyncio.sleep(0.001)
        assert "end" not in pair.prefill_session.kinds(spec.key) and pair.prefill.num_attempts == 1
        engine.runner.gate.set()
        await pair.ends(spec.key, AT_ONCE_S)
        assert pair.prefill_session.kinds(spec.key) == ["failed"] and engine.runner.num_steps == 1
        await pair.check_idle()


async def test_next_epoch_right_behind_an_abort_runs_beside_what_is_left_of_the_old_one() -> None:
    async with worker_pair() as pair:
        spec = spec_of(30, 12)
        for epoch in range(1, 6):
            attempt = replace(spec, key=AttemptKey(spec.key.request_id, epoch))
            pair.send_prefill(attempt)
            pair.send_reserve(attempt)
            for _ in range(3 * epoch):
                await asyncio.sleep(0)
            pair.abort(attempt.key, prefill=True, decode=True)
        last = replace(spec, key=AttemptKey(spec.key.request_id, 6))
        assert await pair.tokens(last) == lone_run(spec, VOCAB)
        for epoch in range(1, 6):
            await pair.ends(AttemptKey(spec.key.request_id, epoch), AT_ONCE_S)
        await pair.check_idle()


# silence -------------------------------------------------------------------------------------------------------------


async def test_handoff_that_nobody_opens_costs_prefill_one_lease_and_no_more() -> None:
    async with worker_pair(settings=IMPATIENT, leases_expired=1) as pair:
        spec = spec_of(20)
        pair.send_prefill(spec)
        await pair.prefill_session.sees(spec.key, "end", AT_ONCE_S)
        assert pair.prefill_session.kinds(spec.key) == ["tokens", "prefilled", "failed"]
        assert pair.prefill_session.failure(spec.key) == "LeaseExpired"
        await pair.check_idle()


async def test_handoff_that_nobody_offers_costs_decode_one_lease_and_no_more() -> None:
    async with worker_pair(settings=IMPATIENT, leases_expired=1) as pair:
        spec = spec_of(20)
        pair.send_reserve(spec)
        await pair.decode_session.sees(spec.key, "end", AT_ONCE_S)
        assert pair.decode_session.kinds(spec.key) == ["reserved", "failed"]
        assert pair.decode_session.failure(spec.key) == "HandoffFailed"
        await pair.check_idle()


async def test_prefill_worker_that_is_not_there_fails_the_reservation_and_frees_it() -> None:
    async with worker_pair() as pair:
        spec = spec_of(20)
        pair.send_reserve(spec, fields={"prefill_incarnation": "an earlier life"})
        await pair.decode_session.sees(spec.key, "end", AT_ONCE_S)
        assert pair.decode_session.failure(spec.key) == "HandoffFailed"
        await pair.check_idle()


async def test_decode_worker_that_stops_tells_prefill_about_what_it_will_not_fetch() -> None:
    async with worker_pair() as pair:
        specs = [spec_of(20, start=n) for n in range(4)]
        for spec in specs:
            pair.send_prefill(spec)
        pair.decode.drain()
        for spec in specs:
            pair.send_reserve(spec)
        await pair.decode.close()  # the link is not even dialled yet
        for spec in specs:
            await pair.prefill_session.sees(spec.key, "end", AT_ONCE_S)
            assert pair.prefill_session.failure(spec.key) == "Draining"


# ends of the workers -------------------------------------------------------------------------------------------------


async def test_drain_lets_running_attempts_finish() -> None:
    async with worker_pair() as pair:
        specs = [spec_of(20, 30, start=n) for n in range(6)]
        for spec in specs:
            pair.send_prefill(spec)
            pair.send_reserve(spec)
        assert pair.prefill.drain() == pair.decode.drain() == len(specs)
        for spec in specs:
            await pair.ends(spec.key)
            assert pair.merged(spec) == lone_run(spec, VOCAB)
        await pair.check_idle()


async def test_what_runs_when_the_grace_is_over_fails_as_draining_once() -> None:
    async with worker_pair() as pair:
        specs = [spec_of(20, 30, start=n) for n in range(6)]
        pair.decode_engine.runner.gate.clear()
        for spec in specs:
            pair.send_prefill(spec)
            pair.send_reserve(spec)
        await pair.decode_engine.runner.is_held()  # one decodes, the others are at any stage before
        for worker in (pair.prefill, pair.decode, pair.decode, pair.prefill):
            worker.abort_all(Draining("the worker stopped"))
        pair.decode_engine.runner.gate.set()
        for spec in specs:
            await pair.ends(spec.key, AT_ONCE_S)
            assert pair.decode_session.failure(spec.key) == "Draining"
        await pair.check_idle()


# damage and bugs -----------------------------------------------------------------------------------------------------


async def test_damaged_frame_fails_both_ends_as_corrupt_and_the_next_one_is_whole() -> None:
    async with worker_pair() as pair:
        runner = pair.decode_engine.runner
        whole = runner.scatter

        def damaged(slab: memoryview, block_ids: Sequence[int]) -> bytes:
            runner.scatter = whole  # type: ignore[method-assign]
            slab[0] ^= 1
            return whole(slab, block_ids)

        runner.scatter = damaged  # type: ignore[method-assign]
        spec = spec_of(20)
        pair.send_prefill(spec)
        pair.send_reserve(spec)
        await pair.ends(spec.key, AT_ONCE_S)
        assert pair.decode_session.failure(spec.key) == pair.prefill_session.failure(spec.key) == "KVCorrupt"
        again = spec_of(20)
        assert await pair.tokens(again) == lone_run(again, VOCAB)
        await pair.check_idle()


async def test_unexpected_error_in_a_receive_is_reported_as_a_fault_of_the_worker() -> None:
    async with worker_pair() as pair:

        async def broken(**_: object) -> None:
            raise RuntimeError("a bug in the fabric")

        pair.decode.receiver.receive = broken  # type: ignore[method-assign, assignment]
        spec = spec_of(20)
        pair.send_reserve(spec)
        await pair.decode_session.sees(spec.key, "reserved")
        for _ in range(5):
            await asyncio.sleep(0)
        assert [str(fault) for fault in pair.faults] == ["a bug in the fabric"]
        pair.faults.clear()


async def test_unexpected_error_in_a_refusal_is_reported_as_a_fault_of_the_worker() -> None:
    async with worker_pair() as pair:

        async def broken(**_: object) -> bool:
            raise RuntimeError("a bug in the fabric")

        pair.decode.receiver.refuse = broken  # type: ignore[method-assign]
        pair.decode.drain()
        pair.send_reserve(spec_of(20))
        for _ in range(5):
            await asyncio.sleep(0)
        assert [str(fault) for fault in pair.faults] == ["a bug in the fabric"]
        pair.faults.clear()
